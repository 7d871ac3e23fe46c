"""A gateway on the running loop: real ports, simulated or scripted engines, and all it tells of itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.api.auth import key_hash
from gateway.config import Config, loads
from gateway.runtime.gateway import Gateway
from gateway.sim.profile import load_profile
from gateway.sim.server import SimServer
from gateway.telemetry.log import CallLog
from tests.fakes.client import Client, chat, connected, get
from tests.fakes.upstream import FakeUpstream, Peer, Received, Script, json_response, until

SMALL, LARGE = "tiny-7b", "tiny-70b"
ADMIN = "key-admin"

NOT_FOUND = json_response({"detail": "Not Found"}, 404)
Answer = Callable[[Peer, Received], Awaitable[None]]


class Logged(StringIO):
    """A log that can be read after it was closed."""

    def close(self) -> None:
        """Keep the text."""


@dataclass
class Running:
    """A gateway that has started; `api` and `ops` are its ports."""

    gateway: Gateway
    text: StringIO

    @property
    def api(self) -> int:
        return self.gateway.api

    @property
    def ops(self) -> int:
        return self.gateway.ops

    def lines(self) -> list[dict[str, Any]]:
        """Every complete line of the log so far, parsed."""
        return [json.loads(line) for line in self.text.getvalue().splitlines()]

    def calls(self) -> list[dict[str, Any]]:
        """The records of the calls that ended."""
        return [line for line in self.lines() if line["event"] == "call"]

    async def logged(self, count: int = 1) -> list[dict[str, Any]]:
        """The records of calls, once there are `count` of them."""
        await until(lambda: len(self.calls()) >= count)
        return self.calls()

    async def record(self, call_id: str) -> dict[str, Any]:
        """The record of one call, once it is there."""
        await until(lambda: any(record["id"] == call_id for record in self.calls()))
        return next(record for record in self.calls() if record["id"] == call_id)

    async def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Every sample of /metrics, by name and labels."""
        text = (await get(self.ops, "/metrics")).body.decode()
        families = text_string_to_metric_families(text)
        return {(each.name, frozenset(each.labels.items())): each.value for f in families for each in f.samples}

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of `tiergate_<name>` that have all of `labels`."""
        wanted = set(labels.items())
        samples = (await self.metrics()).items()
        return sum(value for (found, has), value in samples if found == f"tiergate_{name}" and wanted <= has)

    async def state(self) -> dict[str, Any]:
        """What /admin/state says."""
        answer = await get(self.ops, "/admin/state", key=ADMIN)
        assert answer.status == 200, answer
        value: dict[str, Any] = answer.json()
        return value

    async def pool(self, name: str = "small") -> dict[str, Any]:
        """One pool of the live state."""
        return next(pool for pool in (await self.state())["pools"] if pool["name"] == name)

    async def waits(self, count: int, *bands: str) -> None:
        """Wait until exactly `count` slots of these bands (online, if none is named) stand in line."""
        named = bands or ("online",)
        pools = self.gateway.snapshot
        await until(lambda: sum(pool.waiting[band] for pool in pools().pools for band in named) == count)

    async def idle(self, within: float = 2.0) -> None:
        """Wait until nobody is served, nobody waits, and no tenant has a call in progress, as operators see it."""
        loop = asyncio.get_running_loop()
        end = loop.time() + within
        while busy := _counts(await self.state()):
            assert loop.time() < end, busy
            await asyncio.sleep(0.002)


@dataclass
class Engine:
    """A simulated engine and where it listens."""

    server: SimServer
    port: int

    @property
    def load(self) -> tuple[int, int]:
        """Sequences (running, waiting)."""
        state = self.server.state()
        return state.running, state.waiting

    def bodies(self) -> list[dict[str, Any]]:
        """What it was asked, oldest first."""
        return [json.loads(request.body) for request in self.server.state().requests]


@asynccontextmanager
async def engine(model: str = SMALL, **changes: Any) -> AsyncIterator[Engine]:
    """A simulated engine with the `fast` profile, but for `changes`."""
    server = SimServer(replace(load_profile("fast"), **changes), model)
    port = await server.start()
    try:
        yield Engine(server, port)
    finally:
        await server.stop()


def scripted(answer: Answer) -> Script:
    """A scripted engine: `answer` serves the calls, one after another on a connection; probes get 404."""

    async def script(peer: Peer) -> None:
        while (request := await peer.request()) is not None:
            await (answer(peer, request) if request.method == "POST" else peer.send(NOT_FOUND))

    return script


def always(raw: bytes) -> Script:
    """A scripted engine that gives every call the same answer."""

    async def answer(peer: Peer, request: Received) -> None:
        await peer.send(raw)

    return scripted(answer)


def posted(upstream: FakeUpstream) -> list[Received]:
    """The calls a scripted engine got."""
    return [request for request in upstream.requests if request.method == "POST"]


def said(usage: tuple[int, int] = (10, 5)) -> bytes:
    """A whole chat answer, with this usage (prompt, completion)."""
    counts = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
    message = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}
    return json_response({"id": "c1", "object": "chat.completion", "choices": [message], "usage": counts})


@asynccontextmanager
async def held(gate: Running, key: str = "key-acme", **fields: Any) -> AsyncIterator[Client]:
    """A stream that has begun and goes on until the end of the block, so that its slot is taken."""
    async with connected(gate.api) as client:
        client.post(chat(stream=True, max_tokens=3000, ignore_eos=True, **fields), key=key)
        head = await client.head()
        assert head.status == 200, head
        await client.piece()
        yield client


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[Running]:
    """The gateway of `config`; stopped at the end, whatever its calls are doing."""
    text = Logged()
    log = CallLog(text)
    gateway = Gateway(config, log)
    await gateway.start()
    try:
        yield Running(gateway, text)
    finally:
        if not gateway.draining:
            await gateway.stop()
        await asyncio.to_thread(log.close)


def configured(small: list[int], large: list[int] | None = None, **changes: Any) -> Config:
    """Two pools of engines on these ports, tenants acme, bulk (batch) and intern (small only).

    `changes` are sections of the file; mappings are merged into what is there, None removes.
    """
    pools = {"small": _pool("small", SMALL, small)}
    if large is not None:
        pools["large"] = _pool("large", LARGE, large)
    sections: dict[str, Any] = {
        "listen": {"api": "127.0.0.1:0", "ops": "127.0.0.1:0"},
        "tiers": list(pools),
        "pools": pools,
        "routes": {"auto": {"default": "small", "classifier": {}, "spill": {"up": False}}},
        "drain": {"delay": "0s", "timeout": "2s"},
        "tenants": {
            "acme": {"keys": [key_hash("key-acme")]},
            "bulk": {"keys": [key_hash("key-bulk")], "band": "batch"},
            "intern": {"keys": [key_hash("key-intern")], "tiers": ["small"]},
        },
        "admin": {"keys": [key_hash(ADMIN)]},
    }
    return loads(yaml.safe_dump(_merged(sections, changes)), {})


def tenant(name: str, **section: Any) -> dict[str, Any]:
    """A section of `tenants` for one more tenant, whose key is "key-NAME"."""
    return {name: {"keys": [key_hash(f"key-{name}")], **section}}


def _pool(tier: str, model: str, ports: list[int]) -> dict[str, Any]:
    return {
        "tier": tier,
        "model": model,
        "endpoints": [{"url": f"http://127.0.0.1:{port}"} for port in ports],
        "capacity": {"in_flight": 8, "waiting": 4},
    }


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        before = merged.get(name)
        merged[name] = _merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return {name: value for name, value in merged.items() if value is not None}


def _counts(state: dict[str, Any]) -> dict[str, int]:
    """What is not 0 of the counts of a live state; none may ever be negative."""
    counts = {f"in progress of {name}": tenant["in_progress"] for name, tenant in state["tenants"].items()}
    for pool in state["pools"]:
        for what in ("in_flight", "waiting"):
            counts |= {f"{what} {band} of {pool['name']}": count for band, count in pool[what].items()}
        counts |= {f"in flight of {each['name']}": each["in_flight"] for each in pool["endpoints"]}
    assert min(counts.values()) >= 0, counts
    return {name: count for name, count in counts.items() if count}
