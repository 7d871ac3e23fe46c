"""Bands over HTTP: the key's, lowered by the caller, never raised; batch waits while online flows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes.client import chat, connected, post
from tests.fakes.gateway import configured, engine, held, running


@pytest.mark.parametrize(
    ("key", "headers", "fields", "band"),
    [
        ("key-acme", {}, {}, "online"),
        ("key-acme", {}, {"service_tier": "flex"}, "batch"),
        ("key-acme", {"x_tiergate_band": "batch"}, {}, "batch"),
        ("key-acme", {"x_tiergate_band": "batch"}, {"service_tier": "priority"}, "batch"),
        ("key-acme", {"x_tiergate_band": "online"}, {"service_tier": "auto"}, "online"),
        ("key-bulk", {}, {}, "batch"),
        ("key-bulk", {"x_tiergate_band": "online"}, {}, "batch"),
        ("key-bulk", {}, {"service_tier": "priority"}, "batch"),
    ],
)
async def test_a_caller_may_lower_itself_but_never_raise(
    key: str, headers: dict[str, str], fields: dict[str, Any], band: str
) -> None:
    pools = {"small": {"priority_scheduling": True}}
    async with engine() as small, running(configured([small.port], pools=pools)) as gate:
        answer = await post(gate.api, chat(max_tokens=2, priority=-1000, **fields), key=key, **headers)
        assert answer.status == 200
        assert answer.headers["x-tiergate-band"] == band
        assert (await gate.logged())[0]["band"] == band
        assert small.bodies()[0]["priority"] == (10 if band == "batch" else 0)
        assert await gate.metric("requests_total", band=band, outcome="ok") == 1


async def test_without_priority_scheduling_the_engine_gets_no_priority() -> None:
    async with engine() as small, running(configured([small.port])) as gate:
        await post(gate.api, chat(max_tokens=2, priority=-1000))
        assert "priority" not in small.bodies()[0]


async def test_batch_waits_while_online_flows_and_comes_in_the_end() -> None:
    """Four slots, all online: batch stands in line, online calls that come later pass it."""
    capacity = {"small": {"capacity": {"in_flight": 4, "waiting": 50}, "slo": {"first_token": "30s"}}}
    queue = {"batch": {"floor": 0.0, "headroom": 0.25}, "online": {"timeout": "30s"}}
    async with engine(t0=0.005) as small, running(configured([small.port], pools=capacity, queue=queue)) as gate:
        async with held(gate), held(gate), held(gate), connected(gate.api) as batch:
            batch.post(chat(max_tokens=2), key="key-bulk")
            await gate.waits(1, "batch")
            online = [await post(gate.api, chat(max_tokens=2)) for _ in range(10)]
            assert {answer.status for answer in online} == {200}
            assert (await gate.pool())["waiting"]["batch"] == 1  # three of four slots are taken, one is kept free
        answer = await asyncio.wait_for(post(gate.api, chat(max_tokens=2), key="key-bulk"), 5)
        assert answer.status == 200
        await gate.idle()


async def test_the_wait_is_told() -> None:
    capacity = {"small": {"capacity": {"in_flight": 1, "waiting": 5}}}
    async with engine(t0=0.005) as small, running(configured([small.port], pools=capacity)) as gate:
        async with connected(gate.api) as client:
            async with held(gate):
                client.post(chat(max_tokens=2))
                await gate.waits(1)
                await asyncio.sleep(0.1)
            answer = await client.response()
        assert 100 <= int(answer.headers["x-tiergate-wait-ms"]) < 2000
        assert (await gate.record(answer.headers["x-request-id"]))["wait"] >= 0.1
