from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from gateway.sim.profile import load_profile
from gateway.sim.server import SimServer
from loadtests.client import Answer, Client, Ended, Target, request, target
from tests.loadtests.server import DONE, END, EVENTS, HEAD, STREAM, Server, chunk, refusal, stream, until, whole

ASK = request("POST", "/v1/chat/completions", (), b"{}")


def writes(data: bytes, *, close: bool = False) -> Callable[[int, bytes, asyncio.StreamWriter], Awaitable[None]]:
    async def script(number: int, head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        if close:
            writer.close()

    return script


async def answer_to(data: bytes, *, close: bool = False) -> Answer:
    async with Server(writes(data, close=close)) as server, Client(server.target) as client:
        return await client.call(ASK, 5.0)


async def test_a_stream_is_counted_and_timed() -> None:
    answer = await answer_to(STREAM)
    assert (answer.status, answer.ended, answer.events, answer.tier) == (200, Ended.WHOLE, 3, "small")
    assert answer.first_at is not None
    assert answer.first_at <= answer.ended_at


async def test_a_stream_is_counted_the_same_in_single_bytes() -> None:
    async def bytewise(number: int, head: bytes, writer: asyncio.StreamWriter) -> None:
        for position in range(len(STREAM)):
            writer.write(STREAM[position : position + 1])
            await writer.drain()

    async with Server(bytewise) as server, Client(server.target) as client:
        answer = await client.call(ASK, 5.0)
    assert (answer.ended, answer.events) == (Ended.WHOLE, 3)


async def test_a_comment_is_no_first_token() -> None:
    go_on = asyncio.Event()

    async def script(number: int, head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(b": still here\n\n"))
        await go_on.wait()
        writer.write(chunk(EVENTS[0]) + chunk(DONE) + END)

    async with Server(script) as server, Client(server.target) as client:
        call = asyncio.create_task(client.call(ASK, 5.0))
        await until(lambda: server.received == 1)
        await asyncio.sleep(0.02)
        opened = asyncio.get_running_loop().time()
        go_on.set()
        answer = await call
    assert answer.events == 1
    assert answer.first_at is not None
    assert answer.first_at >= opened - 0.001


@pytest.mark.parametrize(
    ("data", "ended", "status"),
    [
        (HEAD + chunk(EVENTS[0]) + END, Ended.CUT, 200),
        (HEAD + chunk(EVENTS[0]), Ended.CUT, 200),
        (HEAD + chunk(EVENTS[0]) + chunk(b'data: {"error":{}}\n\n') + chunk(DONE) + END, Ended.ERROR, 200),
        (HEAD + chunk(b'data: {"error":{}}\n\n') + END, Ended.ERROR, 200),
        (b"", Ended.CUT, 0),
        (b"nonsense\r\n\r\n", Ended.CUT, 0),
        (whole("200 OK", b"{}"), Ended.WHOLE, 200),
        (whole("500 Oops", b""), Ended.WHOLE, 500),
    ],
)
async def test_how_an_answer_ended(data: bytes, ended: Ended, status: int) -> None:
    answer = await answer_to(data, close=True)
    assert (answer.ended, answer.status) == (ended, status)


async def test_a_refusal_says_why_and_when() -> None:
    answer = await answer_to(refusal("fair_share", "Retry-After: 3"))
    assert (answer.status, answer.reason, answer.retry_after, answer.ended) == (503, "fair_share", 3.0, Ended.WHOLE)
    assert (await answer_to(refusal())).retry_after is None


async def test_connections_are_kept_between_calls() -> None:
    async with Server(stream) as server, Client(server.target) as client:
        for _ in range(5):
            assert (await client.call(ASK, 5.0)).ended is Ended.WHOLE
        assert (server.received, server.connections, client.opened) == (5, 1, 1)


async def test_a_connection_is_not_kept_where_the_server_will_close_it() -> None:
    async with (
        Server(writes(whole("200 OK", b"{}", "connection: close"))) as server,
        Client(server.target) as client,
    ):
        for _ in range(2):
            assert (await client.call(ASK, 5.0)).ended is Ended.WHOLE
        assert server.connections == 2


async def test_a_call_that_is_not_over_in_time_is_hung_and_its_connection_closed() -> None:
    async with Server(writes(HEAD + chunk(EVENTS[0]))) as server, Client(server.target) as client:
        answer = await client.call(ASK, 0.1)
        assert (answer.ended, answer.status) == (Ended.HUNG, 200)
        await until(lambda: server.gone == 1)


async def test_a_caller_that_is_cancelled_hangs_up() -> None:
    async with Server(writes(HEAD)) as server, Client(server.target) as client:
        call = asyncio.create_task(client.call(ASK, 5.0))
        await until(lambda: server.received == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: server.gone == 1)


async def test_nobody_there_is_a_result() -> None:
    async with Server(stream) as server:
        nobody = server.target
    async with Client(nobody) as client:
        answer = await client.call(ASK, 5.0)
    assert (answer.status, answer.ended) == (0, Ended.CUT)
    assert answer.ended_at > 0


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1:8000",
        "http://example.com",
        "https://127.0.0.1:8000",
        "http://127.0.0.1.example.com",
        "127.0.0.1:8000",
        "http://0.0.0.0:80",
        "http://127.0.0.1:8000/v1",
    ],
)
def test_load_is_sent_to_this_machine_only(url: str) -> None:
    with pytest.raises(ValueError, match=r"must look like|loopback"):
        target(url)


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("http://127.0.0.1:8000", Target("127.0.0.1", 8000)),
        ("http://localhost:81/", Target("127.0.0.1", 81)),
        ("http://[::1]:9", Target("::1", 9)),
    ],
)
def test_this_machine_has_many_names(url: str, server: Target) -> None:
    assert target(url) == server


async def test_it_understands_the_simulated_engine() -> None:
    engine = SimServer(replace(load_profile("fast"), max_model_len=2048), "tiny", seed=1)
    port = await engine.start()
    body = (
        b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"max_tokens":5,"ignore_eos":true,"stream":true}'
    )
    sent = request("POST", "/v1/chat/completions", (("content-type", "application/json"),), body)
    try:
        async with Client(Target("127.0.0.1", port)) as client:
            answer = await client.call(sent, 5.0)
    finally:
        await engine.stop()
    assert (answer.status, answer.ended) == (200, Ended.WHOLE)
    assert answer.events == 1 + 5  # the role comes as an event of its own
