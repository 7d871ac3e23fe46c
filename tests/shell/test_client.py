"""The upstream client against an engine that does everything wrong, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.upstream.client import Answer, FailureKind, HttpClient, Outgoing, UpstreamFailed
from tests.fakes.upstream import (
    DEADLINE,
    LAST_CHUNK,
    STREAM_HEAD,
    FakeUpstream,
    Peer,
    RefusedPort,
    Script,
    answers,
    chunk,
    response,
    silent,
    until,
)

POST = Outgoing(b"POST", b"/v1/chat/completions", ((b"content-type", b"application/json"),), b'{"model":"m"}')
GET = Outgoing(b"GET", b"/health")
OK = response(b"{}")


@asynccontextmanager
async def engine_and_client(script: Script, idle_limit: float = 3.0) -> AsyncIterator[tuple[FakeUpstream, HttpClient]]:
    async with FakeUpstream(script) as engine:
        client = HttpClient("127.0.0.1", engine.port, connect_timeout=2.0, idle_limit=idle_limit)
        try:
            yield engine, client
        finally:
            client.close()


async def whole(answer: Answer) -> bytes:
    parts = []
    while data := await answer.read():
        parts.append(data)
    answer.close()
    return b"".join(parts)


async def failing(client: HttpClient, request: Outgoing = POST, first: float | None = None) -> FailureKind:
    with pytest.raises(UpstreamFailed) as caught:
        await whole(await client.send(request, first=first))
    return caught.value.kind


async def test_a_request_is_written_whole_with_the_headers_only_the_client_knows() -> None:
    sent = Outgoing(
        b"POST", b"/v1/x", ((b"x-request-id", b"a"), (b"Host", b"evil"), (b"transfer-encoding", b"chunked")), b"body"
    )
    async with engine_and_client(answers(OK)) as (engine, client):
        answer = await client.send(sent)
        assert (answer.status, await whole(answer)) == (200, b"{}")
        (got,) = engine.requests
    assert (got.method, got.target, got.body) == ("POST", "/v1/x", b"body")
    assert got.headers == {
        "host": f"127.0.0.1:{engine.port}",
        "x-request-id": "a",
        "accept-encoding": "identity",
        "content-length": "4",
    }


@pytest.mark.parametrize("value", [b"a\r\nx: y", b"a\ny", b"a\0"])
async def test_a_header_cannot_smuggle_in_a_line(value: bytes) -> None:
    async with engine_and_client(answers(OK)) as (engine, client):
        with pytest.raises(ValueError):
            await client.send(Outgoing(b"GET", b"/", ((b"x", value),)))
        assert engine.peers == [] and client.active == 0


async def test_framing_and_hop_by_hop_headers_of_the_answer_stay_here() -> None:
    extra = "Connection: keep-alive, X-Private\r\nX-Private: 1\r\nKeep-Alive: timeout=5\r\nX-Kept: yes\r\n"
    async with engine_and_client(answers(response(b"{}", extra=extra))) as (_, client):
        answer = await client.send(GET)
        assert answer.headers == [(b"content-type", b"application/json"), (b"x-kept", b"yes")]
        answer.close()


async def test_connections_are_reused_newest_first() -> None:
    async with engine_and_client(answers(OK)) as (engine, client):
        first, second = await client.send(GET), await client.send(GET)
        await whole(first)
        await whole(second)
        assert client.idle == 2
        await whole(await client.send(GET))
        assert [len(peer.requests) for peer in engine.peers] == [1, 2]


async def test_idle_connections_are_closed_by_a_timer_without_another_request() -> None:
    async with engine_and_client(answers(OK), idle_limit=0.05) as (engine, client):
        await whole(await client.send(GET))
        assert client.idle == 1
        await asyncio.wait_for(engine.peers[0].gone.wait(), DEADLINE)
        assert client.idle == 0


async def test_a_connection_closed_by_the_engine_leaves_the_pool_at_once() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)

    async with engine_and_client(script) as (engine, client):
        await whole(await client.send(GET))
        await until(lambda: client.idle == 0)
        await whole(await client.send(GET))
        assert client.replays == 0 and len(engine.peers) == 2


async def test_bytes_nobody_asked_for_close_an_idle_connection() -> None:
    unasked = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await unasked.wait()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong")
        await peer.client_left()

    async with engine_and_client(script, idle_limit=60.0) as (engine, client):
        await whole(await client.send(GET))
        assert client.idle == 1
        unasked.set()
        await asyncio.wait_for(engine.peers[0].gone.wait(), DEADLINE)
        assert client.idle == 0


async def test_a_second_response_to_one_request_is_never_delivered() -> None:
    async with engine_and_client(answers(OK + response(b"stolen"))) as (engine, client):
        assert await whole(await client.send(GET)) == b"{}"
        assert await whole(await client.send(GET)) == b"{}"
        assert len(engine.peers) == 2


async def test_a_kept_connection_closed_before_any_byte_is_replayed_once_on_a_fresh_one() -> None:
    async def script(peer: Peer) -> None:
        while await peer.request() is not None:
            if peer.number == 0 and len(peer.requests) == 2:
                return
            await peer.send(OK)

    async with engine_and_client(script) as (engine, client):
        await whole(await client.send(POST))
        assert await whole(await client.send(POST)) == b"{}"
        assert client.replays == 1
        assert [len(peer.requests) for peer in engine.peers] == [2, 1]


async def test_no_replay_once_a_byte_of_the_response_came() -> None:
    async def script(peer: Peer) -> None:
        while await peer.request() is not None:
            if len(peer.requests) == 2:
                await peer.send(b"H")
                return
            await peer.send(OK)

    async with engine_and_client(script) as (engine, client):
        await whole(await client.send(POST))
        assert await failing(client) is FailureKind.CUT
        assert len(engine.requests) == 2 and client.replays == 0


async def test_a_fresh_connection_that_is_closed_is_not_replayed() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()

    async with engine_and_client(script) as (engine, client):
        assert await failing(client) is FailureKind.CUT
        assert len(engine.requests) == 1


async def test_connection_refused() -> None:
    with RefusedPort() as nobody:
        client = HttpClient("127.0.0.1", nobody.port)
        assert await failing(client) is FailureKind.CONNECT
        assert (client.active, client.idle) == (0, 0)


FAULTS: dict[str, tuple[bytes, FailureKind]] = {
    "garbage": (b"SSH-2.0-OpenSSH\r\n", FailureKind.PROTOCOL),
    "length and chunked": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\nhi",
        FailureKind.PROTOCOL,
    ),
    "two lengths": (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nhi", FailureKind.PROTOCOL),
    "bad chunk size": (STREAM_HEAD + b"zz\r\nhi\r\n", FailureKind.PROTOCOL),
    "switching": (b"HTTP/1.1 101 S\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", FailureKind.PROTOCOL),
    "other coding": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nhi", FailureKind.PROTOCOL),
    "huge head": (b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000 + b"\r\n\r\n", FailureKind.PROTOCOL),
    "huge head and a body": (
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 66_000 + b"\r\ncontent-length: 90000\r\n\r\n" + b"b" * 90_000,
        FailureKind.PROTOCOL,
    ),
    "endless head": (b"HTTP/1.1 200 OK\r\n" + b"x: aaaaaaaaaaaaaaaaaaaa\r\n" * 4000, FailureKind.PROTOCOL),
    "endless interim": (b"HTTP/1.1 103 E\r\nlink: x\r\n\r\n" * 4000, FailureKind.PROTOCOL),
    "half a head": (b"HTTP/1.1 200 OK\r\ncontent-le", FailureKind.CUT),
    "short length": (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhi", FailureKind.CUT),
    "no last chunk": (STREAM_HEAD + chunk(b"data: 1\n\n"), FailureKind.CUT),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_faults_of_an_engine_have_a_kind_and_leave_nothing_behind(name: str) -> None:
    sent, kind = FAULTS[name]

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(sent)

    async with engine_and_client(script) as (_, client):
        assert await failing(client) is kind
        await until(lambda: client.active == 0)
        assert client.idle == 0


async def test_good_bytes_come_before_the_failure_that_follows_them() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(b"one") + chunk(b"two"))

    async with engine_and_client(script) as (_, client):
        answer = await client.send(POST)
        got = b""
        with pytest.raises(UpstreamFailed) as caught:
            while data := await answer.read():
                got += data
        assert got == b"onetwo" and caught.value.kind is FailureKind.CUT
        answer.close()


async def test_interim_answers_are_skipped() -> None:
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: x\r\n\r\n"
    async with engine_and_client(answers(early + OK)) as (_, client):
        answer = await client.send(POST)
        assert answer.status == 200 and (b"link", b"x") not in answer.headers
        assert await whole(answer) == b"{}" and client.idle == 1


@pytest.mark.parametrize("status", [204, 304])
async def test_answers_without_a_body(status: int) -> None:
    async with engine_and_client(answers(b"HTTP/1.1 %d X\r\n\r\n" % status)) as (_, client):
        answer = await client.send(GET)
        assert (answer.status, await whole(answer), client.idle) == (status, b"", 1)


async def test_head_has_no_body_whatever_its_length_says() -> None:
    async with engine_and_client(answers(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n")) as (_, client):
        answer = await client.send(Outgoing(b"HEAD", b"/"))
        assert (answer.status, await whole(answer), client.idle) == (200, b"", 0)


async def test_a_body_may_end_with_the_connection_and_says_so() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\nall of it")

    async with engine_and_client(script) as (_, client):
        answer = await client.send(GET)
        assert await answer.read() == b"all of it"
        assert (await answer.read(), answer.clean_end) == (b"", False)
        answer.close()


async def test_a_framed_end_is_a_clean_end() -> None:
    async with engine_and_client(answers(STREAM_HEAD + chunk(b"x") + LAST_CHUNK)) as (_, client):
        answer = await client.send(GET)
        ends = [answer.clean_end]
        assert await whole(answer) == b"x"
        ends.append(answer.clean_end)
        assert ends == [False, True] and client.idle == 1


async def test_reading_after_close_is_an_error_and_closing_twice_is_not() -> None:
    async with engine_and_client(answers(OK)) as (engine, client):
        answer = await client.send(GET)
        answer.close()
        answer.close()
        with pytest.raises(UpstreamFailed):
            await answer.read()
        await asyncio.wait_for(engine.peers[0].gone.wait(), DEADLINE)
        assert (client.idle, client.active) == (0, 0)


async def test_an_old_answer_cannot_touch_the_next_exchange() -> None:
    async with engine_and_client(answers(OK, response(b"second"))) as (_, client):
        old = await client.send(GET)
        await whole(old)
        new = await client.send(GET)
        old.close()
        assert await old.read() == b""
        assert await whole(new) == b"second"


@pytest.mark.parametrize("first", [0.0, 0.05])
async def test_no_head_in_time(first: float) -> None:
    async with engine_and_client(silent) as (engine, client):
        assert await failing(client, first=first) is FailureKind.TIMEOUT_FIRST
        await until(lambda: engine.open == 0)
        assert client.active == 0


async def test_the_first_limit_goes_on_after_the_head_until_something_counts() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        await peer.client_left()

    async with engine_and_client(script) as (_, client):
        assert await failing(client, first=0.1) is FailureKind.TIMEOUT_FIRST


async def test_silence_in_the_middle_is_a_gap() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(b"x"))
        await peer.client_left()

    async with engine_and_client(script) as (engine, client):
        answer = await client.send(POST, first=5.0)
        answer.gap = 0.05
        assert await answer.read() == b"x"
        answer.alive()
        with pytest.raises(UpstreamFailed) as caught:
            # Bounded: the timer of the longer limit on the head is still set and must be moved forward.
            await asyncio.wait_for(answer.read(), 2.0)
        assert caught.value.kind is FailureKind.TIMEOUT_GAP
        answer.close()
        await asyncio.wait_for(engine.peers[0].gone.wait(), DEADLINE)


async def test_reading_is_paused_while_nobody_reads() -> None:
    sent = 0
    size = 32 * 1024 * 1024

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while sent < size:
            await peer.send(b"x" * 65536)
            sent += 65536

    async with engine_and_client(script) as (_, client):
        answer = await client.send(POST)
        seen = -1
        while seen != sent:
            seen = sent
            await asyncio.sleep(0.05)
        assert sent < size // 2
        assert len(await whole(answer)) == size
        assert client.idle == 1


async def test_closing_while_reading_is_paused_frees_the_engine() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        while True:
            await peer.send(chunk(b"x" * 65536))

    async with engine_and_client(script) as (engine, client):
        answer = await client.send(POST)
        answer.close()
        await asyncio.wait_for(engine.peers[0].gone.wait(), DEADLINE)
        assert client.active == 0


@pytest.mark.parametrize("headed", [False, True])
@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancelled_call_closes_its_socket(headed: bool, times: int) -> None:
    heads = 0

    async def script(peer: Peer) -> None:
        await peer.request()
        if headed:
            await peer.send(STREAM_HEAD)
        await peer.client_left()

    async def work(client: HttpClient) -> None:
        nonlocal heads
        answer = await client.send(POST)
        heads += 1
        await answer.read()

    async with engine_and_client(script) as (engine, client):
        tasks = [asyncio.ensure_future(work(client)) for _ in range(10)]
        await until(lambda: len(engine.requests) == 10 and heads == (10 if headed else 0))
        for _ in range(times):
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait(tasks)
        await until(lambda: all(peer.gone.is_set() for peer in engine.peers))
        assert (client.active, client.idle) == (0, 0)


async def test_a_storm_of_cancellations_leaves_a_working_client() -> None:
    async with engine_and_client(answers(response(b"{}", extra="connection: close\r\n"))) as (engine, client):

        async def call() -> None:
            await whole(await client.send(POST))

        for wave in range(40):
            tasks = [asyncio.ensure_future(call()) for _ in range(12)]
            for turn in range(9):
                await asyncio.sleep(0)
                if turn % (wave % 4 + 1) == 0:
                    tasks[turn].cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                assert task.cancelled() or task.exception() is None
        assert (client.active, client.idle) == (0, 0)
        await asyncio.wait_for(asyncio.gather(*(call() for _ in range(4))), 1.0)
        await until(lambda: engine.open == 0)


async def test_a_closed_client_ends_every_call_and_takes_none() -> None:
    async with engine_and_client(silent) as (engine, client):
        waiting = asyncio.ensure_future(failing(client))
        await until(lambda: len(engine.requests) == 1)
        client.close()
        assert await waiting is FailureKind.CUT
        assert await failing(client) is FailureKind.CONNECT
        assert (client.active, client.idle) == (0, 0)


async def test_a_large_body_each_way() -> None:
    big = b"x" * 3_000_000
    async with engine_and_client(answers(response(big))) as (engine, client):
        assert await whole(await client.send(Outgoing(b"POST", b"/", (), big))) == big
        assert engine.requests[0].body == big
