"""Limits of a tenant over HTTP: what is left in the headers, races, refunds, and refusals that cost nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fakes.client import Response, chat, connected, post
from tests.fakes.gateway import Running, always, configured, engine, held, posted, running, said, scripted, tenant
from tests.fakes.upstream import FakeUpstream, Peer, Received, RefusedPort, json_response, until


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream(always(said(usage=(10, 5)))) as upstream:
        yield upstream


async def test_headers_tell_what_is_left(upstream: FakeUpstream) -> None:
    limits = {"requests": "6/min", "tokens": "1000/min"}
    async with running(configured([upstream.port], tenants=tenant("t", limits=limits))) as gate:
        first = await post(gate.api, chat(max_tokens=100), key="key-t")
        assert first.headers["x-ratelimit-limit-requests"] == "6"
        assert first.headers["x-ratelimit-remaining-requests"] == "5"
        assert first.headers["x-ratelimit-reset-requests"] == "10s"
        assert first.headers["x-ratelimit-limit-tokens"] == "1000"
        held = 1000 - int(first.headers["x-ratelimit-remaining-tokens"])
        assert 100 < held <= 130  # the worst case, until it is settled
        second = await post(gate.api, chat(max_tokens=100), key="key-t")
        assert second.headers["x-ratelimit-remaining-requests"] == "4"
        spent = 1000 - int(second.headers["x-ratelimit-remaining-tokens"]) - held
        assert 0 <= spent <= 15  # what the engine reported, and no more
        assert not ratelimits(await post(gate.api, chat()))


async def test_a_refusal_tells_what_is_left_too(upstream: FakeUpstream) -> None:
    async with running(configured([upstream.port], tenants=tenant("t", limits={"requests": "1/min"}))) as gate:
        assert (await post(gate.api, chat(), key="key-t")).status == 200
        refused = await post(gate.api, chat(), key="key-t")
        assert refused.error["code"] == "tenant_requests"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert 50 <= int(refused.headers["retry-after"]) <= 91  # a minute, and jitter of up to a half


async def test_calls_at_once_cannot_spend_the_same_tokens(upstream: FakeUpstream) -> None:
    """Fifty calls that hold a hundred each, of a thousand: ten pass."""
    release = asyncio.Event()

    async def answer(peer: Peer, request: Received) -> None:
        await release.wait()
        await peer.send(said(usage=(20, 80)))

    upstream.script = scripted(answer)
    capacity = {"small": {"capacity": {"in_flight": 100}}}
    async with running(
        configured([upstream.port], pools=capacity, tenants=tenant("t", limits={"tokens": "1000/day"}))
    ) as gate:
        estimate = await prompt_estimate(gate, chat(max_tokens=100_000))
        calls = [asyncio.create_task(post(gate.api, chat(max_tokens=100 - estimate), key="key-t")) for _ in range(50)]
        await until(lambda: sum(call.done() for call in calls) == 40)
        release.set()
        answers = await asyncio.gather(*calls)
        assert Counter(answer.status for answer in answers) == {200: 10, 429: 40}
        for refused in answers:
            if refused.status == 429:
                assert refused.error["code"] == "tenant_tokens"
                assert int(refused.headers["retry-after"]) >= 1
        assert len(posted(upstream)) == 10
        await gate.idle()


async def test_a_refusal_by_one_limit_spends_nothing_of_another() -> None:
    limits = tenant("t", limits={"requests": "2/day", "concurrent": 1})
    async with engine(t0=0.02) as small, running(configured([small.port], tenants=limits)) as gate:
        async with held(gate, "key-t"):
            refused = await post(gate.api, chat(), key="key-t")
            assert (refused.status, refused.error["code"]) == (429, "tenant_concurrency")
        await gate.idle()
        third = await post(gate.api, chat(max_tokens=1), key="key-t")
        assert third.status == 200
        assert third.headers["x-ratelimit-remaining-requests"] == "0"


@pytest.mark.parametrize("why", ["connection refused", "engine error", "engine busy", "left while waiting"])
async def test_everything_is_given_back_when_nothing_was_served(upstream: FakeUpstream, why: str) -> None:
    """Each call holds all of the quota; ten that fail leave it whole."""
    broken = {"engine error": 500, "engine busy": 503}
    limits = tenant("t", limits={"tokens": "500/day", "requests": "1/day"})
    with RefusedPort() as gone:
        port = gone.port if why == "connection refused" else upstream.port
        if why in broken:
            upstream.script = always(json_response({"error": {"message": "no"}}, broken[why]))
        pools = {"small": {"capacity": {"in_flight": 1, "waiting": 20}}}
        config = configured([port], pools=pools, tenants=limits, health={"eject_after": 1000}, retry={"attempts": 1})
        async with running(config) as gate:
            body = chat(max_tokens=470)
            for _ in range(10):
                if why == "left while waiting":
                    await left_while_waiting(gate, upstream, body)
                else:
                    assert (await post(gate.api, body, key="key-t")).status in (502, 503)
            await gate.idle()
            last = await post(gate.api, body, key="key-t")
            assert last.headers["x-ratelimit-remaining-requests"] == "0"  # its own hold: all was there
            assert int(last.headers["x-ratelimit-remaining-tokens"]) <= 30


async def test_use_beyond_what_was_held_is_charged(upstream: FakeUpstream) -> None:
    upstream.script = always(said(usage=(10, 900)))
    async with running(configured([upstream.port], tenants=tenant("t", limits={"tokens": "500/day"}))) as gate:
        assert (await post(gate.api, chat(max_tokens=10), key="key-t")).status == 200
        refused = await post(gate.api, chat(max_tokens=1), key="key-t")
        assert refused.error["code"] == "tenant_tokens"
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"


async def test_an_engine_that_refuses_the_call_itself_costs_a_request_but_no_tokens(upstream: FakeUpstream) -> None:
    upstream.script = always(json_response({"error": {"message": "bad 'top_k'", "code": 400}}, 400))
    limits = {"tokens": "500/day", "requests": "5/day"}
    async with running(configured([upstream.port], tenants=tenant("t", limits=limits))) as gate:
        first, second = [await post(gate.api, chat(max_tokens=100), key="key-t") for _ in range(2)]
        assert (first.status, first.json()["error"]["message"]) == (400, "bad 'top_k'")
        assert second.headers["x-ratelimit-remaining-requests"] == "3"
        assert second.headers["x-ratelimit-remaining-tokens"] == first.headers["x-ratelimit-remaining-tokens"]


def ratelimits(answer: Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("x-ratelimit")}


async def prompt_estimate(gate: Running, body: dict[str, Any]) -> int:
    """The prompt estimate of `body`, in tokens: a call that is too large for the quota tells it in the log."""
    refused = await post(gate.api, body, key="key-t")
    record = await gate.record(refused.headers["x-request-id"])
    estimate: int = record["prompt_estimate"]
    return estimate


async def left_while_waiting(gate: Running, upstream: FakeUpstream, body: dict[str, Any]) -> None:
    async def silent(peer: Peer, request: Received) -> None:
        await peer.client_left()

    before, upstream.script = upstream.script, scripted(silent)
    async with connected(gate.api) as holder:
        holder.post(chat())
        await until(lambda: bool(upstream.peers) and gate_in_flight(gate) == 1)
        async with connected(gate.api) as client:
            client.post(body, key="key-t")
            await gate.waits(1)
        upstream.script = before
    await gate.idle()


def gate_in_flight(gate: Running) -> int:
    return sum(sum(pool.in_flight.values()) for pool in gate.gateway.snapshot().pools)
