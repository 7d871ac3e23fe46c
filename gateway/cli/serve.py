"""`tiergate serve` and `tiergate sim`: a gateway, or one simulated engine, until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path

import uvloop

from gateway.cli.check import loaded
from gateway.config.schema import Config
from gateway.runtime.gateway import Gateway, open_log
from gateway.runtime.notyet import refused
from gateway.runtime.servers import ListenError
from gateway.sim.profile import Profile, ProfileError, load_profile
from gateway.sim.server import serve as serve_engine


def serve(path: Path, workers: int) -> int:
    """Run the gateway of a configuration file; 0 after a drain, 1 if it cannot be run, 2 for wrong options."""
    config = loaded(path)
    if config is None:
        return 1
    if workers > 1:
        print(
            f"--workers {workers}: several processes can count together only through a Redis store, "
            "which this version does not have. Run one worker.",
            file=sys.stderr,
        )
        return 2
    if unbuilt := refused(config):
        print(*unbuilt, sep="\n", file=sys.stderr)
        return 1
    logging.basicConfig(level=config.log.level.upper(), stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # starts and stops are told once, in the call log
    return run(_gateway(config))


def simulate(host: str, port: int, model: str, profile: str, with_parent: bool) -> int:
    """Run one simulated engine (`with_parent`: until standard input closes).

    0 after a signal, 1 if the port cannot be had, 2 for an unusable profile.
    """
    try:
        chosen = load_profile(profile)
    except (ProfileError, OSError) as error:
        print(f"--profile {profile}: {error}", file=sys.stderr)
        return 2
    try:
        return run(_engine(host, port, model, chosen, with_parent))
    except OSError as error:
        print(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port", file=sys.stderr)
        return 1


def run(work: Coroutine[None, None, int]) -> int:
    """Run `work` on the fast event loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def _gateway(config: Config) -> int:
    try:
        log = open_log(config)
    except OSError as error:
        print(f"log.file: cannot write {config.log.file} ({error.strerror})", file=sys.stderr)
        return 1
    gateway = Gateway(config, log)
    try:
        await gateway.start()
        await gateway.run()
    except ListenError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        await asyncio.to_thread(log.close)
    return 0


async def _engine(host: str, port: int, model: str, profile: Profile, with_parent: bool) -> int:
    def started(bound: int) -> None:
        print(f"simulated engine {model} ({profile.name}) on http://{host}:{bound}", flush=True)
        if with_parent:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _end_with_parent)

    await serve_engine(profile, model, host, port, started)
    return 0


def _end_with_parent() -> None:
    if not os.read(sys.stdin.fileno(), 1024):
        os.kill(os.getpid(), signal.SIGTERM)
