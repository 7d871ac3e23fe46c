"""The comparison with peers: its upstream and its load generator, on real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from loadtests.client import Client, Ended, Target, request
from loadtests.overhead.load import Callers, Connection, Counts, Steady, steadily
from loadtests.overhead.measure import chat
from loadtests.overhead.source import CHAT, MARK, Phases, Upstream, answer, asked, whole
from tests.loadtests.server import STREAM, Server, until

STREAMED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n~ ~\n\n\r\n3\r\n~\n\n\r\n0\r\n\r\n"
COUNTED = b"HTTP/1.1 200 OK\r\nserver: x\r\nContent-Length: 4\r\n\r\nabcd"


@asynccontextmanager
async def upstream() -> AsyncIterator[Target]:
    server = await asyncio.get_running_loop().create_server(Phases().connected, "127.0.0.1", 0)
    async with server:
        yield Target("127.0.0.1", server.sockets[0].getsockname()[1])


async def test_a_call_has_a_canned_completion_again_and_again() -> None:
    async with upstream() as at, Client(at) as client:
        for _ in range(3):
            got = await client.call(chat(()), 5.0)
            assert (got.status, got.ended, got.body) == (200, Ended.WHOLE, CHAT)
        assert client.opened == 1
    assert json.loads(CHAT)["choices"][0]["message"]["role"] == "assistant"


async def test_a_stream_has_the_events_its_prompt_asks_for_then_another_follows() -> None:
    async with upstream() as at, Client(at) as client:
        for events in (7, 3):
            got = await client.call(chat((), events, 0), 5.0)
            assert (got.status, got.ended) == (200, Ended.WHOLE)
            assert got.events == events + 3  # the role before them, finish reason and usage behind them
        assert client.opened == 1


async def test_a_paced_stream_takes_its_time() -> None:
    async with upstream() as at, Client(at) as client:
        got = await client.call(chat((), 20, 100), 5.0)
        assert got.first_at is not None
        assert got.ended_at - got.first_at > 0.17


async def test_every_event_is_json_with_one_mark() -> None:
    async with upstream() as at:
        reader, writer = await asyncio.open_connection(at.host, at.port)
        writer.write(chat((), 2, 0))
        text = await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()
    datas = [line[6:] for line in text.split(b"\n") if line.startswith(b"data: ")]
    assert datas[-1] == b"[DONE]"
    assert [line.count(MARK) for line in datas] == [0, 1, 1, 0, 0, 0]
    assert [json.loads(line)["object"] for line in datas[:-1]] == ["chat.completion.chunk"] * 5


class Wire(asyncio.Transport):
    """Where a connection under test writes."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Nobody reads it."""

    def abort(self) -> None:
        """Nothing is open."""


class Paused(Upstream):
    """Tells when it was paused, and has little room for bytes that nobody reads."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.pauses = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        super().connection_made(transport)

    def pause_writing(self) -> None:
        self.pauses += 1
        super().pause_writing()


async def test_a_reader_that_is_slow_gets_every_event_once() -> None:
    made = Paused()
    server = await asyncio.get_running_loop().create_server(lambda: made, "127.0.0.1", 0)
    near = socket.socket()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    near.connect(server.sockets[0].getsockname())
    async with server:
        reader, writer = await asyncio.open_connection(sock=near, limit=4096)
        writer.write(chat((), 2000, 0))
        await until(lambda: made.pauses > 0)
        parts = [await reader.read(8192)]
        while not parts[-1].endswith(b"\r\n0\r\n\r\n"):
            parts.append(await reader.read(8192))
        text = b"".join(parts)
        assert text.count(MARK) == 2000
        assert text.count(b"[DONE]") == 1
        writer.write(chat(()))  # nothing of the stream comes behind its end
        assert (await reader.readexactly(len(answer(CHAT)))) == answer(CHAT)
        writer.close()


class Full(Wire):
    """Keeps what is written, and pauses its writer at the given write, as a transport does whose buffer is full."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at
        self.writer = Upstream(0.0)
        self.written: list[bytes] = []
        self.writer.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))
        if len(self.written) == self._at:
            self.writer.pause_writing()


async def turns_of_the_loop() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("full_at", [1, 2, 4, 5])
async def test_a_stream_rests_while_nobody_reads_and_then_goes_on_where_it_was(full_at: int) -> None:
    wire = Full(full_at)
    wire.writer.data_received(chat((), 3, 0))  # the head, three events, the end
    await turns_of_the_loop()
    assert len(wire.written) == full_at
    wire.writer.resume_writing()
    await turns_of_the_loop()
    assert len(wire.written) == 5
    assert b"".join(wire.written).count(MARK) == 3


async def test_a_stream_that_may_go_on_at_once_does_so_once() -> None:
    wire = Full(1)
    wire.writer.data_received(chat((), 3, 0))
    wire.writer.resume_writing()
    await turns_of_the_loop()
    assert len(wire.written) == 5


async def test_a_gateway_that_looks_at_its_engine_finds_one() -> None:
    async with upstream() as at, Client(at) as client:
        models = await client.call(request("GET", "/v1/models"), 5.0)
        metrics = await client.call(request("GET", "/metrics"), 5.0)
        health = await client.call(request("GET", "/health"), 5.0)
    assert json.loads(models.body)["data"][0]["id"] == "bench"
    assert b"vllm:num_requests_waiting" in metrics.body
    assert health.status == 200


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nhost: a\r\n", False),
        (b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nab", False),
        (b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", True),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n", False),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", True),
    ],
)
def test_a_request_is_whole_by_its_own_framing(text: bytes, holds: bool) -> None:
    assert whole(text) is holds


def test_the_words_for_a_stream_are_those_the_source_knows() -> None:
    assert asked(5, 100).encode() in chat((), 5, 100)
    assert b"events=" not in chat(())


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
@pytest.mark.parametrize(("text", "events"), [(STREAMED, 3), (COUNTED, 0), (answer(b"~~"), 2), (STREAM, 0)])
def test_an_answer_is_over_at_its_last_byte_however_it_is_cut(text: bytes, events: int, step: int) -> None:
    over: list[bool] = []
    counts = Counts()
    connection = Connection(counts, lambda _, good: over.append(good))
    connection.connection_made(Wire())
    for number in (1, 2):
        connection.ask(b"")
        for at in range(0, len(text), step):
            assert len(over) == number - 1
            connection.data_received(text[at : at + step])
        assert over == [True] * number
    assert counts == Counts(begun=2, answers=2, events=2 * events, failed=0)


@pytest.mark.parametrize(
    "text",
    [
        b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\nno",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nuntil the end",
    ],
)
def test_what_is_no_whole_200_is_a_failure(text: bytes) -> None:
    over: list[bool] = []
    counts = Counts()
    connection = Connection(counts, lambda _, good: over.append(good))
    connection.connection_made(Wire())
    connection.ask(b"")
    connection.data_received(text)
    assert over == [False]
    assert (counts.answers, counts.failed) == (0, 1)


async def test_a_connection_that_is_cut_is_a_failure_and_rests() -> None:
    async def cut(number: int, head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(COUNTED[:-1])
        writer.transport.close()

    async with Server(cut) as server, Callers(server.target, chat(()), 3, again=True) as callers:
        await until(lambda: callers.counts.failed == 3)
        assert (callers.counts.answers, server.received) == (0, 3)


async def test_callers_ask_again_only_if_they_should() -> None:
    async with upstream() as at:
        async with Callers(at, chat((), 4, 0), 5, again=False) as once:
            assert await once.finished(5.0)
            assert once.counts == Counts(begun=5, answers=5, events=20)
        async with Callers(at, chat(()), 5, again=True) as often:
            await until(lambda: often.counts.answers > 100)
        assert often.counts.failed == 0


async def test_callers_that_do_not_end_are_not_waited_for() -> None:
    async with upstream() as at, Callers(at, chat((), 1000, 1), 1, again=False) as callers:
        assert not await callers.finished(0.05)


async def test_steady_calls_leave_at_equal_gaps_in_turns() -> None:
    came: list[tuple[str, float]] = []
    loop = asyncio.get_running_loop()

    def script(name: str):  # type: ignore[no-untyped-def]
        async def told(number: int, head: bytes, writer: asyncio.StreamWriter) -> None:
            came.append((name, loop.time()))
            writer.write(COUNTED)

        return told

    async with Server(script("a")) as one, Server(script("b")) as two:
        loads = Steady(one.target, chat(())), Steady(two.target, chat(()))
        async with loads[0], loads[1]:
            await steadily(loads, 50, 0.2)
            await until(lambda: all(len(load.times) == 10 for load in loads))
    assert [name for name, _ in came] == ["a", "b"] * 10
    assert all(after - before < 0.2 for (_, before), (_, after) in pairwise(came))
    assert all(0 < seconds < 5 for load in loads for seconds in load.times)


async def test_steady_calls_do_not_wait_for_answers() -> None:
    async def silent(number: int, head: bytes, writer: asyncio.StreamWriter) -> None:
        pass

    async with Server(silent) as server:
        async with Steady(server.target, chat(())) as load:
            await steadily((load,), 200, 0.1)
            await until(lambda: server.received == 20)
            assert not load.times
        await until(lambda: server.gone == 20)
