"""Clients that do what they should not: too many, not reading, not speaking HTTP."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from typing import Any

import pytest

from gateway.runtime.servers import listener
from tests.fakes.client import chat, connected, get, post, request
from tests.fakes.gateway import configured, engine, held, running, scripted, tenant
from tests.fakes.upstream import STREAM_HEAD, FakeUpstream, Peer, Received, chunk, event, until

DELTA = event({"id": "c", "choices": [{"index": 0, "delta": {"content": "x" * 60_000}, "finish_reason": None}]})


async def test_a_client_that_does_not_read_is_cut_off_and_not_buffered_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The engine would send 50 MB at once; what the gateway takes of it is what fits into the sockets between."""
    sent = 0

    async def firehose(peer: Peer, request: Received) -> None:
        nonlocal sent
        await peer.send(STREAM_HEAD)
        for _ in range(50_000_000 // len(DELTA)):
            await peer.send(chunk(DELTA))
            sent += len(DELTA)

    limits = tenant("one", limits={"concurrent": 1})
    async with (
        FakeUpstream(scripted(firehose)) as upstream,
        running(configured([upstream.port], tenants=limits, timeouts={"body": "400ms"})) as gate,
    ):
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", gate.api))
            body = b'{"model":"small","stream":true,"messages":[{"role":"user","content":"hi"}]}'
            call = request("POST", "/v1/chat/completions", body, "key-one")
            await loop.sock_sendall(client, call)
            assert (await loop.sock_recv(client, 15)) == b"HTTP/1.1 200 OK"
            began, before = loop.time(), memory()
            await gate.idle(within=3)
            assert 0.2 <= loop.time() - began <= 2.0
            assert memory() - before < 20_000_000
            assert sent < 20_000_000
        record = (await gate.logged())[0]
        assert (record["outcome"], record["reason"]) == ("gone", "client_stalled")
        fire = next(peer for peer in upstream.peers if any(each.method == "POST" for each in peer.requests))
        await until(fire.gone.is_set)
        assert not caplog.records


async def test_a_client_that_reads_slowly_but_reads_gets_everything() -> None:
    """Longer than the limit on a single write, never still for that long."""
    async with engine(t0=0.001) as small, running(configured([small.port], timeouts={"body": "300ms"})) as gate:
        async with connected(gate.api) as client:
            client.post(chat(stream=True, max_tokens=40, ignore_eos=True))
            head = await client.head()
            for _ in range(10):
                await client.piece()
                await asyncio.sleep(0.05)
            answer = await client.rest(head)
            assert answer.done
        assert (await gate.logged())[0]["outcome"] == "ok"


async def test_a_client_of_a_slow_engine_is_not_a_slow_client() -> None:
    """The engine is still for twice as long as a write may take; nobody waits for the client."""
    async with engine(t0=0.005) as small, running(configured([small.port], timeouts={"body": "200ms"})) as gate:
        async with connected(gate.api) as client:
            client.post(chat(stream=True, max_tokens=20, ignore_eos=True))
            head = await client.head()
            small.server.inject({"freeze": 0.5})
            assert (await client.rest(head)).done
        assert (await gate.logged())[0]["outcome"] == "ok"


@pytest.mark.parametrize(
    "junk",
    [
        os.urandom(10_240),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 10_229,
        b"GET / HTTP/1.1\r\n" + b"x" * 10_240,
        b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 7\r\n\r\nhello",
        b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=["random", "tls", "head without end", "two lengths", "negative length", "bad chunk", "http/2"],
)
async def test_junk_on_the_socket_hurts_nobody(junk: bytes) -> None:
    async with engine() as small, running(configured([small.port])) as gate:
        async with connected(gate.api) as client, held(gate):
            client.send(junk)
            client.writer.write_eof()
            async with asyncio.timeout(5):
                answer = await client.reader.read(-1)
            assert b" 200 " not in answer
            assert b"Traceback" not in answer
            assert (await post(gate.api, chat(max_tokens=1))).status == 200
        await gate.idle()
        assert not small.server.state().running


async def test_a_burst_of_two_hundred_on_a_tiny_pool() -> None:
    """Everybody is answered or shed, in time; the engine never holds more than the limit; nothing stays."""
    most = 0
    capacity = {"small": {"capacity": {"in_flight": 3, "waiting": 6}}}
    async with engine(t0=0.002) as small:
        config = configured([small.port], pools=capacity, tenants=tenant("beta"), queue={"online": {"timeout": "1s"}})
        async with running(config) as gate:

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, sum(small.load))
                    await asyncio.sleep(0.001)

            watcher = asyncio.create_task(watch())
            keys = ("key-acme", "key-beta", "key-bulk", "key-intern")
            calls = [
                post(gate.api, chat(stream=n % 2 == 0, max_tokens=5, ignore_eos=True), key=keys[n % 4])
                for n in range(200)
            ]
            async with asyncio.timeout(15):
                answers = await asyncio.gather(*calls)
            watcher.cancel()
            seen = Counter(answer.status for answer in answers)
            assert set(seen) <= {200, 429, 503}
            assert seen[200] >= 50 + 3  # all of batch, whose line is long, and who came first of the others
            assert seen[503] + seen[429] >= 50
            for answer in answers:
                if answer.status != 200:
                    assert answer.error["code"] in ("past_knee", "fair_share", "queue_timeout", "deadline_unreachable")
                    assert int(answer.headers["retry-after"]) >= 1
                elif answer.headers["content-type"].startswith("text/event-stream"):
                    assert answer.done
            assert most <= 3
            await gate.idle()
            outcomes = Counter(record["outcome"] for record in await gate.logged(200))
            assert outcomes["ok"] == seen[200]
            assert sum(outcomes.values()) == 200
            assert await gate.metric("requests_total") == 200
            assert await gate.metric("waiting") == await gate.metric("in_flight") == 0


async def test_small_writes_are_not_held_back_for_an_acknowledgement() -> None:
    """Without TCP_NODELAY on both sides, tokens after the first answer of a connection come 40 ms late."""
    async with engine() as small, running(configured([small.port])) as gate, connected(gate.api) as client:
        for _ in range(12):
            client.post(chat(stream=True, max_tokens=4, ignore_eos=True))
            assert (await client.response()).done
        first_tokens = sorted(record["first_token"] for record in await gate.logged(12))
        assert first_tokens[3] < 0.03


def test_accepted_connections_do_not_wait_to_send() -> None:
    with listener("127.0.0.1", 0, "listen.api") as ours, socket.create_connection(ours.getsockname()):
        accepted, _ = ours.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_many_idle_connections_do_not_stop_the_others() -> None:
    async with engine() as small, running(configured([small.port])) as gate:
        idle: list[Any] = [await asyncio.open_connection("127.0.0.1", gate.api) for _ in range(200)]
        assert (await post(gate.api, chat(max_tokens=1))).status == 200
        assert (await get(gate.api, "/readyz")).status == 200
        for _, writer in idle:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for _, writer in idle))


def memory() -> int:
    """Resident bytes of this process: gateway, engine and client in one."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
