"""Real processes of the command: output captured line by line, killed by pid at the end, whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

import gateway
from gateway.api.auth import key_hash

ROOT = Path(gateway.__file__).parents[1]
START = 30.0
END = 15.0


@dataclass
class Process:
    """`out` and `err` are the lines so far."""

    process: asyncio.subprocess.Process
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)
    moved: asyncio.Condition = field(default_factory=asyncio.Condition)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """As `kill -9` does."""
        self.signal(signal.SIGKILL)

    async def line(self, pattern: str, stream: str = "out") -> re.Match[str]:
        """The first line of `out` (or `err`) in which `pattern` is found, once it was written."""
        lines: list[str] = getattr(self, stream)

        def found() -> re.Match[str] | None:
            return next((match for line in lines if (match := re.search(pattern, line))), None)

        async with self.moved:
            try:
                await asyncio.wait_for(self.moved.wait_for(lambda: found() or self._over()), START)
            except TimeoutError:
                raise AssertionError(f"{pattern!r} was not written; out {self.out}, err {self.err}") from None
        match = found()
        assert match, f"{pattern!r} was not written; out {self.out}, err {self.err}"
        return match

    async def ended(self, within: float = END) -> int:
        """The exit code."""
        return await asyncio.wait_for(self.process.wait(), within)

    def _over(self) -> bool:
        return self.process.returncode is not None

    async def read(self, stream: asyncio.StreamReader, lines: list[str]) -> None:
        """Collect a stream to its end."""
        while line := await stream.readline():
            async with self.moved:
                lines.append(line.decode().rstrip("\n"))
                self.moved.notify_all()


@asynccontextmanager
async def process(*arguments: str, closed: str = "", **env: str) -> AsyncIterator[Process]:
    """`tiergate ARGUMENTS` as a process of its own; `closed` is what a shell says to start it with streams closed."""
    child = await asyncio.create_subprocess_exec(
        *(("sh", "-c", f'exec "$0" "$@" {closed}') if closed else ()),
        *(sys.executable, "-W", "error", "-m", "gateway", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | env,
    )
    running = Process(child)
    assert child.stdout is not None
    assert child.stderr is not None
    readers = [
        asyncio.create_task(running.read(child.stdout, running.out)),
        asyncio.create_task(running.read(child.stderr, running.err)),
    ]
    try:
        yield running
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
        # A child of the child may hold the pipes; that is its own fault to be found, not ours to wait for.
        _, late = await asyncio.wait(readers, timeout=2)
        for reader in late:
            reader.cancel()


@dataclass(frozen=True)
class Finished:
    """What a command that ended by itself left."""

    code: int
    out: str
    err: str


async def run(*arguments: str, **env: str) -> Finished:
    """A command that is expected to end by itself."""
    async with process(*arguments, **env) as command:
        code = await command.ended(START)
    return Finished(code, "\n".join(command.out), "\n".join(command.err))


@dataclass(frozen=True)
class Served:
    """A gateway process and its ports."""

    process: Process
    api: int
    ops: int

    def events(self) -> list[dict[str, object]]:
        """The log so far."""
        return [json.loads(line) for line in self.process.out if line.startswith("{")]


@asynccontextmanager
async def sim(profile: str = "fast", model: str = "m") -> AsyncIterator[tuple[Process, int]]:
    """An engine process and its port."""
    async with process("sim", "--port", "0", "--model", model, "--profile", profile) as engine:
        port = int((await engine.line(r"on http://127\.0\.0\.1:(\d+)"))[1])
        yield engine, port


@asynccontextmanager
async def serve(path: Path, *ports: int, change: Callable[[dict[str, object]], object] = id) -> AsyncIterator[Served]:
    """A gateway process with one pool `small` over the engines on `ports`; key "key-acme", admin "key-admin".

    `path` is a folder for its configuration, which `change` may change before it is written.
    """
    config: dict[str, object] = {
        "listen": {"api": "127.0.0.1:0", "ops": "127.0.0.1:0"},
        "tiers": ["small"],
        "pools": {
            "small": {
                "tier": "small",
                "model": "m",
                "endpoints": [{"url": f"http://127.0.0.1:{port}"} for port in ports],
                "capacity": {"in_flight": 8, "waiting": 8},
            }
        },
        "tenants": {"acme": {"keys": [key_hash("key-acme")]}},
        "admin": {"keys": [key_hash("key-admin")]},
    }
    change(config)
    file = path / "gateway.yaml"
    file.write_text(yaml.safe_dump(config))
    async with process("serve", str(file)) as served:
        started = await served.line(r'"event":"started"')
        told = json.loads(started.string)
        yield Served(served, told["api"], told["ops"])


@asynccontextmanager
async def demo() -> AsyncIterator[tuple[Process, int, int]]:
    """The demo without its traffic, its API port and its ops port."""
    async with process("demo", "--no-traffic", "--port", "0", "--ops-port", "0") as running:
        api = await running.line(r"API +http://127\.0\.0\.1:(\d+)/v1")
        ops = await running.line(r"metrics +http://127\.0\.0\.1:(\d+)/metrics")
        yield running, int(api[1]), int(ops[1])
