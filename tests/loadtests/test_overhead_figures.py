"""The comparison with peers: its plan, its figures, what is read from /proc, where peers are kept."""

from __future__ import annotations

import json
import os
from pathlib import Path
from time import thread_time_ns

import pytest

from loadtests.__main__ import main
from loadtests.overhead.bench import cores
from loadtests.overhead.figures import NAMES, Figures, as_json, medians, table
from loadtests.overhead.install import Installer, cache_folder
from loadtests.overhead.plan import ALL_PEERS, QUICK_PEERS, Plan, chosen, full, quick, turns
from loadtests.overhead.procfs import (
    Memory,
    family,
    memory,
    parent_and_session,
    parsed_memory,
    processor_time,
    running_ns,
    spent,
)
from loadtests.overhead.subjects import peer

ROLLUP = """55d0a000-7ffd5000 ---p 00000000 00:00 0                    [rollup]
Rss:               12000 kB
Pss:                8000 kB
Pss_Dirty:          3000 kB
"""


def process(proc: Path, pid: int, parent: int, session: int, threads: dict[int, int], name: str = "py") -> None:
    folder = proc / str(pid)
    (folder / "task").mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} ({name}) S {parent} {pid} {session} 0 -1 4194560 1 2\n")
    (folder / "smaps_rollup").write_text(ROLLUP)
    for thread, ns in threads.items():
        (folder / "task" / str(thread)).mkdir()
        (folder / "task" / str(thread) / "schedstat").write_text(f"{ns} 77 12\n")


def test_a_stat_line_is_read_behind_its_last_bracket() -> None:
    assert parent_and_session("12 (a) b (c) S 3 12 9 0 -1") == (3, 9)


def test_a_schedstat_line_begins_with_the_time_on_a_processor() -> None:
    assert running_ns("123456789 55 7\n") == 123456789


def test_memory_is_read_in_bytes_and_a_missing_figure_is_an_error() -> None:
    assert parsed_memory(ROLLUP) == Memory(12000 * 1024, 8000 * 1024)
    with pytest.raises(KeyError):
        parsed_memory("Rss: 3 kB\n")


def test_a_family_is_the_session_and_its_descendants_wherever_they_went(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, 10, {10: 5})
    process(tmp_path, 11, 10, 10, {11: 5}, name="worker (1)")
    process(tmp_path, 12, 11, 12, {12: 5})  # made a session of its own
    process(tmp_path, 13, 1, 10, {13: 5})  # its parent ended
    process(tmp_path, 20, 1, 20, {20: 5})
    (tmp_path / "meminfo").write_text("")
    assert family(10, tmp_path) == {10, 11, 12, 13}
    assert memory((10, 11, 99), tmp_path) == Memory(24000 * 1024, 16000 * 1024)


def test_processor_time_is_that_of_all_threads_also_of_new_ones(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, 10, {10: 1000, 11: 200})
    before = processor_time((10, 99), tmp_path)
    assert before == {10: 1000, 11: 200}
    assert spent(before, {10: 1500, 12: 40}) == 540


def test_the_time_of_this_very_thread_is_seen() -> None:
    # The kernel brings a running thread's figure up to date on its ticks, at the latest every 10 ms.
    before, used = processor_time((os.getpid(),)), thread_time_ns()
    while thread_time_ns() - used < 60_000_000:
        pass
    assert spent(before, processor_time((os.getpid(),))) > 40_000_000
    assert memory((os.getpid(),)).rss > 5_000_000


def test_figures_are_medians_over_the_rounds_that_have_them() -> None:
    rounds = [Figures(us_per_request=1.0, carried=0.5), Figures(us_per_request=9.0), Figures(us_per_request=2.0)]
    assert medians(rounds) == Figures(us_per_request=2.0, carried=0.5)


def test_the_table_has_a_line_for_each_gateway_and_a_dash_for_what_is_missing() -> None:
    heading, one, two = table({"tiergate": Figures(us_per_request=26.74, rss_mib=44.0), "nginx": Figures()})
    assert heading.split()[0] == "us/request"
    assert one.split()[:3] == ["tiergate", "26.7", "-"]
    assert two.split() == ["nginx", *["-"] * len(NAMES)]
    assert len(heading) == len(one) == len(two)


def test_the_json_has_the_figures_by_gateway() -> None:
    told = json.loads(as_json({"tiergate": Figures(us_per_request=26.71239, added_p99_ms=0.5), "nginx": Figures()}))
    assert list(told) == ["tiergate", "nginx"]
    assert told["tiergate"]["us_per_request"] == 26.7124
    assert {"us_per_request", "us_per_chunk", "added_p99_ms", "rss_mib"} <= told["nginx"].keys()
    assert told["nginx"]["rss_mib"] is None


def test_gateways_take_turns() -> None:
    assert list(turns(("a", "b"), 2)) == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]


def test_a_quick_run_has_two_peers_and_fits_into_a_minute() -> None:
    plan = quick()
    assert plan.peers == QUICK_PEERS
    windows = plan.seconds * (2 + plan.slow_share) + 3 * plan.warm_up + 2 * plan.settle
    assert windows * plan.rounds * (2 + len(plan.peers)) < 48  # both faces of the gateway, and time to start
    assert full().peers == ALL_PEERS
    assert quick(("smg",), 0.5) == Plan(("smg",), seconds=0.5, warm_up=0.2, back_to_back=0, slow_share=1.0, settle=0.3)


@pytest.mark.parametrize("change", [{"rounds": 0}, {"seconds": 0.0}, {"seconds": float("nan")}, {"seconds": 61.0}])
def test_a_plan_is_bounded(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="window"):
        Plan((), **change)  # type: ignore[arg-type]


def test_peers_are_chosen_by_name() -> None:
    assert chosen("smg, nginx,") == ("smg", "nginx")
    with pytest.raises(ValueError, match=r"no such peer: envoy"):
        chosen("nginx,envoy")
    with pytest.raises(ValueError, match="twice"):
        chosen("nginx,nginx")


def test_every_peer_that_may_be_chosen_is_known() -> None:
    assert len({peer(name) for name in ALL_PEERS}) == len(ALL_PEERS)


def test_the_measured_gateway_has_a_core_to_itself_where_there_are_two() -> None:
    use = cores({0, 1, 4})
    assert (use.measured, use.others) == ({4}, {0, 1})
    assert (cores({2}).measured, cores({2}).others) == ({2}, {2})


def test_peers_are_kept_in_the_cache_folder_of_the_user() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/tiergate-bench")
    assert cache_folder({"XDG_CACHE_HOME": "", "HOME": "/h"}) == Path("/h/.cache/tiergate-bench")


async def test_what_is_installed_is_not_installed_again(tmp_path: Path) -> None:
    (tmp_path / "vllm-router").mkdir()
    (tmp_path / "vllm-router" / ".made").write_text("vllm-router==1")
    told: list[str] = []
    program = await Installer(tmp_path, told.append).python("vllm-router==1", "vllm-router")
    assert program == tmp_path / "vllm-router" / "bin" / "vllm-router"
    assert not told


@pytest.mark.parametrize("options", [("--peers", "envoy"), ("--seconds", "0"), ("--seconds", "many")])
def test_options_without_sense_exit_with_2(options: tuple[str, ...]) -> None:
    try:
        code: object = main(("overhead", *options))
    except SystemExit as end:
        code = end.code
    assert code == 2
