"""A client that leaves, at any moment: the engine stops within half a second and nothing stays taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.fakes.client import Client, chat, connected, post, request
from tests.fakes.gateway import Engine, Running, configured, engine, held, posted, running, scripted, tenant
from tests.fakes.upstream import FakeUpstream, Peer, Received, json_response, until

SOON = 0.5
LIMITS = tenant("one", limits={"concurrent": 1, "tokens": "5000/day", "requests": "2/day"})


@pytest.fixture
async def small() -> AsyncIterator[Engine]:
    async with engine(t0=0.01, max_num_seqs=1) as small:
        yield small


@pytest.fixture
async def gate(small: Engine) -> AsyncIterator[Running]:
    async with running(configured([small.port], tenants=LIMITS)) as gate:
        yield gate


def fin(client: Client) -> None:
    client.writer.close()


def rst(client: Client) -> None:
    client.reset()


LEAVE = pytest.mark.parametrize("leave", [fin, rst])


@LEAVE
async def test_in_the_middle_of_a_stream(small: Engine, gate: Running, leave: Callable[[Client], None]) -> None:
    async with held(gate) as client:
        assert small.load == (1, 0)
        leave(client)
        await gone(small, gate)
    record = (await gate.logged())[0]
    assert (record["outcome"], record["reason"], record["status"]) == ("gone", "client_gone", 499)
    assert record["usage_estimated"]
    assert record["completion_tokens"] >= 1
    assert small.server.state().aborted == 1


@LEAVE
@pytest.mark.parametrize("stream", [True, False])
async def test_before_the_first_token(
    small: Engine, gate: Running, leave: Callable[[Client], None], stream: bool
) -> None:
    """The engine is busy with another sequence, so that this one waits inside it."""
    async with held(gate) as other, connected(gate.api) as client:
        client.post(chat(stream=stream, max_tokens=1000), key="key-one")
        await until(lambda: small.load == (1, 1))
        leave(client)
        await until(lambda: small.load == (1, 0), SOON)
        await until(lambda: in_progress(gate) == 1, SOON)
        leave(other)
        await gone(small, gate)
    record = (await gate.logged(2))[0]
    assert (record["tenant"], record["outcome"]) == ("one", "gone")
    assert "prompt_tokens" not in record  # nothing was delivered, so nothing is charged
    answer = await post(gate.api, chat(max_tokens=1), key="key-one")
    assert (answer.status, answer.headers["x-ratelimit-remaining-requests"]) == (200, "1")


@LEAVE
async def test_a_plain_answer(small: Engine, gate: Running, leave: Callable[[Client], None]) -> None:
    async with connected(gate.api) as client:
        client.post(chat(max_tokens=3000, ignore_eos=True), key="key-one")
        await until(lambda: small.load == (1, 0))
        leave(client)
        await gone(small, gate)
    assert (await gate.logged())[0]["reason"] == "client_gone"
    assert (await post(gate.api, chat(max_tokens=1), key="key-one")).status == 200


@LEAVE
@pytest.mark.parametrize("key", ["key-one", "key-bulk"])
async def test_while_waiting_in_line(leave: Callable[[Client], None], key: str) -> None:
    """A runs, B waits and leaves, C waits: the engine gets A and C, never B."""
    async with engine(t0=0.01) as small:
        config = configured([small.port], pools={"small": {"capacity": {"in_flight": 1}}}, tenants=LIMITS)
        async with running(config) as gate, held(gate, user="A") as first:
            async with connected(gate.api) as left, connected(gate.api) as last:
                left.post(chat(user="B"), key=key)
                await gate.waits(1, "online", "batch")
                last.post(chat(user="C", max_tokens=2))
                await gate.waits(2, "online", "batch")
                leave(left)
                await asyncio.wait_for(gate.waits(1, "online", "batch"), SOON)
                record = (await gate.logged())[0]
                assert (record["outcome"], record["pool"]) == ("gone", "small")
                leave(first)
                assert (await last.response()).status == 200
            assert [body["user"] for body in small.bodies()] == ["A", "C"]
            await gone(small, gate)


async def test_while_the_body_is_on_its_way(small: Engine, gate: Running) -> None:
    async with connected(gate.api) as client:
        client.send(request("POST", "/v1/chat/completions", b'{"model":', "key-one", content_length="5000"))
        await asyncio.sleep(0.02)
        client.reset()
    assert (await gate.logged())[0]["reason"] == "client_gone"
    await gone(small, gate)


async def test_in_the_very_moment_of_the_turn(small: Engine, gate: Running) -> None:
    """Waves of callers of whom most leave after a moment: whatever the moment, nothing stays."""
    for wave in range(8):
        clients = []
        for number in range(16):
            reader, writer = await asyncio.open_connection("127.0.0.1", gate.api)
            clients.append(Client(reader, writer))
            clients[-1].post(chat(stream=number % 2 == 0, max_tokens=3), key="key-acme")
        for number, client in enumerate(clients):
            for _ in range(number * (wave + 1) % 13):
                await asyncio.sleep(0)
            (rst if number % 2 else fin)(client)
        await asyncio.gather(*(client.close() for client in clients))
    await gone(small, gate, within=3.0)
    assert {record["outcome"] for record in await gate.logged()} <= {"ok", "gone", "shed"}
    assert (await post(gate.api, chat(max_tokens=1))).status == 200


async def test_during_the_second_attempt() -> None:
    """The first engine is busy, the second says nothing: its socket is closed when the client leaves."""
    busy = json_response({"error": {"message": "busy", "code": 503}}, 503)

    async def first(peer: Peer, request: Received) -> None:
        await peer.send(busy)

    async def second(peer: Peer, request: Received) -> None:
        await peer.client_left()

    script = Either(first, second)
    async with (
        FakeUpstream(scripted(script.of(0))) as one,
        FakeUpstream(scripted(script.of(1))) as two,
        running(configured([one.port, two.port], retry={"budget": 1.0})) as gate,
    ):
        async with connected(gate.api) as client:
            client.post(chat())
            await until(lambda: bool(posted(one) and posted(two)))
            fin(client)
            await gate.idle(SOON)
        last = one if script.order[1] == 0 else two
        await until(lambda: any(peer.gone.is_set() for peer in last.peers if peer.requests), SOON)
        assert len(posted(one)) == len(posted(two)) == 1
        record = (await gate.logged())[0]
        assert record["reason"] == "client_gone"


async def test_one_after_another_on_one_connection_is_no_leaving(gate: Running) -> None:
    """Keep-alive and pipelined bytes: the watcher for a client that leaves must not eat the next request."""
    async with connected(gate.api) as client:
        for _ in range(3):
            client.post(chat(stream=True, max_tokens=3))
            assert (await client.response()).done
        client.post(chat(max_tokens=3))
        client.post(chat(max_tokens=3))
        assert [(await client.response()).status for _ in range(2)] == [200, 200]
    assert {record["outcome"] for record in await gate.logged(5)} == {"ok"}


class Either:
    """Two engines of which the one that is asked first plays the first part."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts
        self.order: list[int] = []

    def of(self, number: int) -> Any:
        async def answer(peer: Peer, request: Received) -> None:
            self.order.append(number)
            await self._parts[len(self.order) - 1](peer, request)

        return answer


async def gone(small: Engine, gate: Running, within: float = SOON) -> None:
    """The engine is idle, and so is everything in the gateway, gauges included."""
    await until(lambda: small.load == (0, 0) and small.server.state().in_flight == 0, within)
    await gate.idle(within)
    for gauge in ("in_flight", "waiting", "endpoint_in_flight"):
        assert await gate.metric(gauge) == 0


def in_progress(gate: Running) -> int:
    return sum(sum(pool.in_flight.values()) for pool in gate.gateway.snapshot().pools)
