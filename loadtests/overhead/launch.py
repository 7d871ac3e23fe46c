"""Processes of a run: started on chosen cores, waited for, and ended with all their children, whatever happens."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from loadtests.client import Client, Target
from loadtests.overhead.procfs import family

_PARENT_DIED = 1  # PR_SET_PDEATHSIG
_LOOK = 0.1  # s between looks whether a server is up
_LAST_WORDS = 300  # characters of a program's errors that are shown
_END = 5.0  # s until a killed process must be gone


class BenchError(Exception):
    """Something cannot be measured; the message says what and why."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started; `headers` go with every call to it."""

    argv: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str] = field(default_factory=dict)
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Server:
    """A server that was started, and where its standard error goes."""

    name: str
    process: asyncio.subprocess.Process
    errors: Path

    @property
    def pids(self) -> frozenset[int]:
        """Its processes now."""
        return family(self.process.pid)

    def last_words(self) -> str:
        """The end of what it wrote on standard error."""
        text = self.errors.read_text(encoding="utf-8", errors="replace").strip()
        return " / ".join(text[-_LAST_WORDS:].splitlines())


@asynccontextmanager
async def started(name: str, launch: Launch, cores: Set[int], errors: Path) -> AsyncIterator[Server]:
    """Run a server on `cores` inside the block. Raises BenchError if there is no such program."""
    with errors.open("wb") as file:
        try:
            process = await asyncio.create_subprocess_exec(
                *launch.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=file,
                cwd=launch.cwd,
                env=os.environ | launch.env,
                start_new_session=True,  # its processes are known by their session
                preexec_fn=_settled(cores),
            )
        except OSError as error:
            raise BenchError(f"{name}: cannot run {launch.argv[0]} ({error.strerror})") from error
    server = Server(name, process, errors)
    try:
        yield server
    finally:
        await asyncio.shield(_ended(server))


def _settled(cores: Set[int]) -> Callable[[], None]:
    """What a child does before it becomes the server: take its cores, and end when this process ends, however."""
    library = ctypes.CDLL(None, use_errno=True)

    def settle() -> None:
        os.sched_setaffinity(0, cores)
        library.prctl(_PARENT_DIED, signal.SIGTERM, 0, 0, 0)

    return settle


async def _ended(server: Server) -> None:
    """Kill it with its children; it has nothing to save. A child made in between shows up in the next look."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_END):
            while server.process.returncode is None or server.pids:
                for pid in server.pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.01)


async def ready(server: Server, target: Target, sent: bytes, within: float) -> None:
    """Return once a call was answered with 200. Raises BenchError if the server ends, or that takes too long."""
    seen = "no answer"
    async with Client(target) as client:
        for _ in range(max(1, round(within / _LOOK))):
            if server.process.returncode is not None:
                raise BenchError(f"{server.name}: ended with code {server.process.returncode}: {server.last_words()}")
            answer = await client.call(sent, within)
            if answer.status == 200:
                return
            if answer.status:
                seen = f"status {answer.status} {answer.body[:_LAST_WORDS].decode(errors='replace')}"
            await asyncio.sleep(_LOOK)
    raise BenchError(f"{server.name}: not up after {within:.0f} s ({seen}): {server.last_words()}")


def free_port() -> int:
    """A port that nobody listens on now; programs that cannot choose one themselves are given it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
