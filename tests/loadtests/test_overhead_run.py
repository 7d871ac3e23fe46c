"""The comparison with peers, whole: a plain pass-through is measured, and no process outlives the run."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from loadtests.overhead.bench import compare
from loadtests.overhead.figures import Figures
from loadtests.overhead.launch import BenchError, Launch, started
from loadtests.overhead.plan import Plan
from loadtests.overhead.procfs import family
from loadtests.overhead.subjects import Ports, Subject, nginx_engine, tiergate_config
from tests.loadtests.server import until

SCRIPT = Path(__file__).with_name("passthrough.py")
PLAN = Plan((), rounds=1, seconds=0.4, warm_up=0.1, connections=4, streams=5, rate=50, back_to_back=2, settle=0.2)


def passing(seen: list[int]) -> Subject:
    def launch(ports: Ports, folder: Path) -> Launch:
        seen.append(ports.listen)
        return Launch((sys.executable, str(SCRIPT), str(ports.listen), str(ports.upstream)), folder)

    return Subject("passing", launch)


def broken(name: str) -> Subject:
    return Subject(name, lambda ports, folder: Launch((sys.executable, "-c", "raise SystemExit('no licence')"), folder))


def mine() -> set[int]:
    """Processes of this one, without itself."""
    return set(family(os.getpid())) - {os.getpid()}


def measured(place: Path, *subjects: Subject) -> tuple[dict[str, Figures], list[str]]:
    told: list[str] = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(compare(PLAN, subjects, None, place, told.append)), told


def test_a_pass_through_is_measured_and_a_broken_peer_is_left_out(tmp_path: Path) -> None:
    before, cores, ports = mine(), os.sched_getaffinity(0), list[int]()
    results, told = measured(tmp_path, passing(ports), broken("closed"))
    assert list(results) == ["passing"]
    figures = results["passing"]
    assert None not in [getattr(figures, name) for name in Figures.__dataclass_fields__]
    assert 1 < (figures.us_per_request or 0) < 20_000
    assert 1 < (figures.us_per_chunk or 0) < 20_000
    assert (figures.carried or 0) > 0.3
    assert 1 < (figures.rss_mib or 0) < 500
    assert len(ports) == 2
    assert any(line.startswith("left out: closed (calls): ended with code 1: no licence") for line in told)
    assert mine() == before
    assert os.sched_getaffinity(0) == cores


def test_without_the_first_subject_there_is_no_run(tmp_path: Path) -> None:
    before = mine()
    with pytest.raises(BenchError, match="no licence"):
        measured(tmp_path, broken("tiergate"))
    assert mine() == before


async def test_a_server_ends_with_its_children(tmp_path: Path) -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    launch = Launch((sys.executable, "-c", script), tmp_path)
    async with started("two", launch, os.sched_getaffinity(0), tmp_path / "err") as server:
        await until(lambda: len(server.pids) == 2)
        both = server.pids
    assert not any(alive(pid) for pid in both)


async def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"gone: cannot run /no/such/program"):
        async with started("gone", Launch(("/no/such/program",), tmp_path), {0}, tmp_path / "err"):
            pass


STARTS = """
import asyncio, os, sys
from pathlib import Path
from loadtests.overhead.launch import Launch, started

async def main():
    launch = Launch((sys.executable, "-c", "import time; time.sleep(60)"), Path("."))
    async with started("server", launch, os.sched_getaffinity(0), Path(sys.argv[1])) as server:
        print(server.process.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("end", ["kill", "terminate"])
async def test_servers_end_with_the_run_even_if_it_is_killed(tmp_path: Path, end: str) -> None:
    root = Path(__file__).parents[2]
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STARTS, str(tmp_path / "err"), cwd=root, stdout=asyncio.subprocess.PIPE
    )
    assert run.stdout is not None
    server = int(await run.stdout.readline())
    assert alive(server)
    stop: Callable[[], None] = getattr(run, end)
    stop()
    await run.wait()
    await until(lambda: not alive(server))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_the_configurations_hold_what_they_should(tmp_path: Path) -> None:
    text = tiergate_config(Ports(1001, 1002, 1003), tmp_path, "direct").read_text()
    assert 'api: "127.0.0.1:1001"' in text
    assert "server: direct" in text
    assert "http://127.0.0.1:1002" in text
    nginx = nginx_engine(Path("/usr/sbin/nginx"), 1004, tmp_path)
    assert nginx.argv[0] == "/usr/sbin/nginx"
    assert "listen 127.0.0.1:1004" in (tmp_path / "nginx.conf").read_text()
