"""`tiergate demo`: simulated engines as processes of their own, a gateway in front, and what to try."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack

from gateway.cli.serve import run
from gateway.cli.traffic import Traffic
from gateway.config.load import loads
from gateway.config.mistakes import ConfigError
from gateway.config.schema import Config
from gateway.config.shipped import shipped
from gateway.runtime.gateway import Gateway
from gateway.runtime.servers import ListenError
from gateway.telemetry.log import CallLog

# Model, profile, and the address that stands for it in the shipped configuration.
_ENGINES = (
    ("small", "demo-7b", "127.0.0.1:18101"),
    ("small", "demo-7b", "127.0.0.1:18102"),
    ("large", "demo-70b", "127.0.0.1:18201"),
)
_STATE_EVERY = 5.0  # s
_START_LIMIT = 30.0  # s

_TRY = """
Tiergate demo: two simulated 7B engines (pool small), one simulated 70B engine (pool large), one gateway.

  API      http://127.0.0.1:{api}/v1          keys: tg-demo-online, tg-demo-batch, tg-demo-small-only
  metrics  http://127.0.0.1:{ops}/metrics     live state: /admin/state (key tg-demo-admin)

Try, in another terminal (-i shows the headers that say why):

  curl -i http://127.0.0.1:{api}/v1/chat/completions -H 'authorization: Bearer tg-demo-online' \\
    -H 'content-type: application/json' \\
    -d '{{"model":"auto","max_tokens":50,"messages":[{{"role":"user","content":"Translate to French: good morning"}}]}}'

  curl -iN http://127.0.0.1:{api}/v1/chat/completions -H 'authorization: Bearer tg-demo-online' \\
    -H 'content-type: application/json' \\
    -d '{{"model":"auto","stream":true,"messages":[{{"role":"user","content":"Prove that sqrt(2) is irrational"}}]}}'

  curl -s http://127.0.0.1:{ops}/admin/state -H 'authorization: Bearer tg-demo-admin'

Ctrl-C drains and ends it. Every call is a JSON line on standard error.
"""


def demo(port: int, ops_port: int, traffic: bool) -> int:
    """Run until a signal; 0 after a drain, 1 if it could not start."""
    return run(_demo(port, ops_port, traffic))


async def _demo(port: int, ops_port: int, traffic: bool) -> int:
    async with AsyncExitStack() as stack:
        try:
            engines = await asyncio.gather(*(_engine(stack, model, profile) for model, profile, _ in _ENGINES))
            config = _configured(port, ops_port, engines)
            log = CallLog(sys.stderr)
            stack.push_async_callback(asyncio.to_thread, log.close)
            gateway = Gateway(config, log)
            await gateway.start({"listen.api": "--port", "listen.ops": "--ops-port"})
        except (ListenError, ConfigError, EngineStartError) as error:
            print(error, file=sys.stderr)
            return 1
        print(_TRY.format(api=gateway.api, ops=gateway.ops), flush=True)
        beside = [asyncio.create_task(_tell(gateway))]
        if traffic:
            beside.append(asyncio.create_task(Traffic(gateway.api, lambda: gateway.draining).run()))
        try:
            await gateway.run()
        finally:
            for task in beside:
                task.cancel()
    return 0


class EngineStartError(Exception):
    """A simulated engine did not come up."""


async def _engine(stack: AsyncExitStack, model: str, profile: str) -> str:
    """Start one engine; returns its host:port. It ends with this process, however that ends."""
    command = ("-m", "gateway", "sim", "--port", "0", "--model", model, "--profile", profile, "--with-parent")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the gateway, which drains before its engines go
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    stack.push_async_callback(_ended, process)
    try:
        async with asyncio.timeout(_START_LIMIT):
            line = await process.stdout.readline() if process.stdout else b""
    except TimeoutError:
        line = b""
    if b"http://" not in line:
        raise EngineStartError(f"the simulated engine {model} ({profile}) did not start")
    return line.decode().rsplit("http://", 1)[1].strip()


async def _ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        await process.wait()


def _configured(port: int, ops_port: int, engines: list[str]) -> Config:
    text = shipped("demo")
    for (_, _, stands_for), address in zip(_ENGINES, engines, strict=True):
        text = text.replace(stands_for, address)
    text = text.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace("127.0.0.1:8001", f"127.0.0.1:{ops_port}")
    return loads(text, os.environ, source="the demo configuration")


async def _tell(gateway: Gateway) -> None:
    """A line about the pools now and then, when something moved."""
    before = ""
    while True:
        await asyncio.sleep(_STATE_EVERY)
        state = " | ".join(
            f"{pool.name}: {sum(pool.in_flight.values())} of {pool.limit} in flight, "
            f"{sum(pool.waiting.values())} waiting ({pool.waiting.get('batch', 0)} batch)"
            for pool in gateway.snapshot().pools
        )
        if state != before:
            print(state, flush=True)
        before = state
