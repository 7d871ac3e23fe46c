"""The whole run: upstreams and gateways are started, measured in turns, and ended."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence, Set
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtests.client import Target
from loadtests.overhead.figures import Figures, medians
from loadtests.overhead.install import Installer, NotInstalled, cache_folder
from loadtests.overhead.launch import BenchError, Launch, Server, free_port, ready, started
from loadtests.overhead.measure import Running, chat, turn
from loadtests.overhead.plan import Plan, turns
from loadtests.overhead.subjects import (
    Ports,
    Subject,
    nginx_engine,
    peer,
    source,
    tiergate,
    tiergate_check,
    tiergate_config,
)

_UP = 60.0  # s until a server must answer

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Cores:
    """The gateway that is measured has one to itself, everything else shares the others."""

    measured: Set[int]
    others: Set[int]


def cores(usable: Set[int]) -> Cores:
    """The last one is measured; on a machine with a single one nothing is apart."""
    last = {max(usable)}
    return Cores(last, (set(usable) - last) or last)


@asynccontextmanager
async def pinned(here: Set[int]) -> AsyncIterator[None]:
    """This process (it makes the load) runs on these cores inside the block."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, here)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def overhead(plan: Plan, say: Say) -> dict[str, Figures]:
    """Install what is missing, then measure Tiergate and the peers. Raises BenchError if Tiergate cannot be measured.

    Peers that cannot be installed or started are left out, and `say` is told why.
    """
    _end_on_sigterm()
    installer = Installer(cache_folder(os.environ), say)
    peers = [subject for name in plan.peers if (subject := await _peer(name, installer, say))]
    try:
        engine = await installer.nginx()
    except NotInstalled as error:
        say(f"upstream of plain calls is the stream source: {error}")
        engine = None
    with tempfile.TemporaryDirectory(prefix="tiergate-bench-") as folder:
        place = Path(folder)
        own = [tiergate("tiergate", "asgi")]
        if await _serves_direct(place):
            own.append(tiergate("tiergate-direct", "direct"))
        return await compare(plan, (*own, *peers), engine, place, say)


async def compare(
    plan: Plan, subjects: Sequence[Subject], engine: Path | None, place: Path, say: Say
) -> dict[str, Figures]:
    """Measure `subjects`, of which the first must come up; `engine` is an nginx for plain calls, `place` a folder."""
    use = cores(os.sched_getaffinity(0))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(pinned(use.others))
        streams, calls = await _upstreams(stack, engine, use, place)
        running = {}
        for subject in subjects:
            try:
                running[subject.name] = await _running(stack, subject, (calls, streams), use, place)
            except BenchError as error:
                if subject is subjects[0]:
                    raise
                say(f"left out: {error}")
        rounds: dict[str, list[Figures]] = {name: [] for name in running}
        for number, name in turns(tuple(running), plan.rounds):
            say(f"round {number} of {plan.rounds}: {name} (load average {os.getloadavg()[0]:.2f})")
            rounds[name].append(await turn(plan, running[name], calls, say))
        return {name: medians(each) for name, each in rounds.items()}


async def _upstreams(stack: AsyncExitStack, engine: Path | None, use: Cores, place: Path) -> tuple[Target, Target]:
    """Addresses of the upstream of streams and of the one of plain calls."""
    streams = calls = Target("127.0.0.1", free_port())
    await _up(stack, "source", source(streams.port), use.others, place, streams, chat(()))
    if engine is not None:
        calls = Target("127.0.0.1", free_port())
        launch = nginx_engine(engine, calls.port, _folder(place, "engine"))
        await _up(stack, "nginx as upstream", launch, use.others, place, calls, chat(()))
    return streams, calls


async def _running(
    stack: AsyncExitStack, subject: Subject, upstreams: tuple[Target, Target], use: Cores, place: Path
) -> Running:
    """Start a gateway in front of both upstreams: of plain calls, and of streams. Idle it costs the other nothing."""
    up: list[tuple[Server, Target, Launch]] = []
    async with AsyncExitStack() as so_far:
        for upstream, kind in zip(upstreams, ("calls", "streams"), strict=True):
            ports = Ports(free_port(), upstream.port, free_port())
            target = Target("127.0.0.1", ports.listen)
            launch = subject.launch(ports, _folder(place, f"{subject.name}-{kind}"))
            name = f"{subject.name} ({kind})"
            server = await _up(so_far, name, launch, use.measured, place, target, chat(launch.headers))
            up.append((server, target, launch))
        stack.push_async_callback(so_far.pop_all().aclose)
    (calls, calls_at, first), (streams, streams_at, second) = up
    return Running(subject.name, calls, calls_at, streams, streams_at, first.headers, second.headers)


async def _up(
    stack: AsyncExitStack, name: str, launch: Launch, on: Set[int], place: Path, target: Target, sent: bytes
) -> Server:
    errors = place / f"{name.replace(' ', '-')}.err"
    server = await stack.enter_async_context(started(name, launch, on, errors))
    await ready(server, target, sent, _UP)
    return server


def _folder(place: Path, name: str) -> Path:
    folder = place / name
    folder.mkdir()
    return folder


async def _peer(name: str, installer: Installer, say: Say) -> Subject | None:
    try:
        return await peer(name)(installer)
    except NotInstalled as error:
        say(f"{name} left out: {error}")
        return None


async def _serves_direct(place: Path) -> bool:
    """Whether this version has the second server face."""
    check = tiergate_check(tiergate_config(Ports(1, 2, 3), place, "direct"))
    async with started("check", check, os.sched_getaffinity(0), place / "check.err") as server:
        return await server.process.wait() == 0


def _end_on_sigterm() -> None:
    """A polite end ends the servers, too; the system ends them where this process has no say any more."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
