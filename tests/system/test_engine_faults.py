"""Engines that fail, at any moment: the client learns the truth, another engine helps while it can, nothing leaks."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.client import Response, chat, connected, eventually, get, post
from tests.fakes.gateway import Engine, Running, always, configured, engine, held, posted, running, scripted
from tests.fakes.process import serve, sim
from tests.fakes.upstream import (
    LAST_CHUNK,
    STREAM_HEAD,
    FakeUpstream,
    Peer,
    Received,
    RefusedPort,
    chat_events,
    chunk,
    event,
    json_response,
    response,
    stream_response,
    until,
)

STREAM = chat(stream=True, max_tokens=6, ignore_eos=True)
PICKS = 60  # the gateway throws a coin between two idle engines; so many throws show both sides
WORDS = chat_events("Hel", "lo", usage=(7, 2))


@pytest.fixture
async def small() -> AsyncIterator[Engine]:
    async with engine(t0=0.005) as small:
        yield small


@pytest.fixture
async def gate(small: Engine) -> AsyncIterator[Running]:
    pools = {"small": {"timeouts": {"first_token": "300ms", "gap": "200ms"}, "slo": {"inter_token": "1ms"}}}
    async with running(configured([small.port], pools=pools, health={"eject_after": 100})) as gate:
        yield gate


def assert_broken_off(answer: Response, code: str) -> dict[str, Any]:
    """A 200 that ends in one error event, the framing proper, without [DONE]."""
    assert answer.status == 200
    *before, last = [json.loads(each) for each in answer.events()]
    assert not any("error" in each for each in before)
    error: dict[str, Any] = last["error"]
    assert error["code"] == code
    assert "[DONE]" not in answer.events()
    return error


# -- in the middle of a stream ------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [{"cut_after": 3}, {"cut_after": 3, "rst": True}])
async def test_an_engine_that_breaks_off(small: Engine, gate: Running, order: Mapping[str, object]) -> None:
    small.server.inject(order)
    answer = await post(gate.api, STREAM)
    error = assert_broken_off(answer, "upstream_error")
    assert error["type"] == "upstream_error"
    said = [json.loads(each) for each in answer.events()[:-1]]
    assert sum(bool(each["choices"][0]["delta"].get("content")) for each in said) >= (2 if "rst" in order else 3)
    record = await gate.record(answer.headers["x-request-id"])
    assert (record["outcome"], record["reason"], record["status"]) == ("failed", "upstream_error", 200)
    assert record["usage_estimated"]
    await gate.idle()
    assert await gate.metric("requests_total", outcome="failed", reason="upstream_error") == 1
    assert await gate.metric("requests_total", outcome="ok") == 0


async def test_an_engine_that_freezes(small: Engine, gate: Running) -> None:
    async with held(gate) as client:
        small.server.inject({"freeze": True})
        began = asyncio.get_running_loop().time()
        rest = await client.pieces()
        assert 0.15 <= asyncio.get_running_loop().time() - began <= 1.0
        assert b'"code":"upstream_timeout"' in rest
        assert b"[DONE]" not in rest
    small.server.inject({"reset": True})
    await gate.idle()
    await until(lambda: small.load == (0, 0))


async def test_an_engine_that_ends_politely_without_having_finished() -> None:
    async def half(peer: Peer, request: Received) -> None:
        await peer.send(STREAM_HEAD + b"".join(chunk(each) for each in WORDS[:2]) + LAST_CHUNK)

    async with FakeUpstream(scripted(half)) as upstream, running(configured([upstream.port])) as gate:
        assert_broken_off(await post(gate.api, STREAM), "upstream_error")


async def test_an_engines_own_error_event_passes_as_it_is(small: Engine, gate: Running) -> None:
    small.server.inject({"error_event_after": 3, "code": 500, "count": 1})
    answer = await post(gate.api, STREAM)
    events = answer.events()
    assert (answer.status, events[-1]) == (200, "[DONE]")
    assert json.loads(events[-2])["error"]["code"] == 500
    record = await gate.record(answer.headers["x-request-id"])
    assert (record["outcome"], record["reason"]) == ("failed", "upstream_error")


async def test_nothing_is_sent_twice_once_content_was_sent() -> None:
    async def cut(peer: Peer, request: Received) -> None:
        await peer.send(STREAM_HEAD + b"".join(chunk(each) for each in WORDS[:2]))
        peer.reset()

    async with (
        FakeUpstream(scripted(cut)) as one,
        FakeUpstream(scripted(cut)) as two,
        running(configured([one.port, two.port], retry={"budget": 1.0})) as gate,
    ):
        assert_broken_off(await post(gate.api, STREAM), "upstream_error")
        assert len(posted(one)) + len(posted(two)) == 1


async def test_an_engine_killed_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    """kill -9 on a real process: the slot is back, and the next call is refused as the pool has no other engine."""
    async with sim("demo-7b") as (killed, port), serve(tmp_path, port) as gate:
        async with connected(gate.api) as client:
            client.post(chat(stream=True, max_tokens=500, ignore_eos=True))
            assert (await client.head()).status == 200
            await client.piece()
            killed.kill()
            rest = await client.pieces()
        assert b'"code":"upstream_error"' in rest
        assert b"[DONE]" not in rest
        await killed.process.wait()  # until then its listening socket may still take a connection
        after = await post(gate.api, chat())
        assert (after.status, after.error["code"]) == (503, "no_endpoint")
        assert str(port) not in after.body.decode()
        pool = (await get(gate.ops, "/admin/state", key="key-admin")).json()["pools"][0]
        assert pool["in_flight"] == {"online": 0, "batch": 0}
        gate.process.signal(signal.SIGTERM)
        assert await gate.process.ended() == 0


# -- before the first byte ----------------------------------------------------------------------------------------


async def test_an_error_before_anything_else_has_its_true_status(small: Engine, gate: Running) -> None:
    small.server.inject({"error_event_after": 0, "code": 500, "count": 1})
    failed = await post(gate.api, STREAM)
    assert (failed.status, failed.error["code"]) == (502, "upstream_error")
    small.server.inject({"error_event_after": 0, "code": 400, "count": 1})
    refused = await post(gate.api, STREAM)
    assert refused.status == 400
    assert refused.headers["content-type"] == "application/json"


async def test_a_first_event_that_is_an_error_moves_to_the_other_engine() -> None:
    busy = stream_response([event({"error": {"message": "overloaded", "code": 503}}), event(b"[DONE]")])
    async with (
        FakeUpstream(always(busy)) as one,
        FakeUpstream(always(stream_response(WORDS))) as two,
        running(configured([one.port, two.port], retry={"budget": 1.0})) as gate,
    ):
        for _ in range(PICKS):
            answer = await post(gate.api, STREAM)
            assert (answer.status, answer.text()) == (200, "Hello")
            assert sum('"role"' in each for each in answer.events()) == 1
            if posted(one):
                break
        assert (await gate.record(answer.headers["x-request-id"]))["attempts"] == 2


async def test_an_engine_that_refuses_connections_is_passed_over(small: Engine) -> None:
    with RefusedPort() as gone:
        async with running(configured([gone.port, small.port], health={"eject_after": 1000})) as gate:
            attempts = 1
            for _ in range(PICKS):
                answer = await post(gate.api, STREAM)
                assert (answer.status, answer.done) == (200, True)
                record = await gate.record(answer.headers["x-request-id"])
                assert record["endpoint"] == f"127.0.0.1:{small.port}"
                attempts = max(attempts, record["attempts"])
                if attempts == 2:
                    break
            assert attempts == 2


async def test_an_engine_that_comes_back_is_used_again(small: Engine, gate: Running) -> None:
    small.server.inject({"refuse": True})
    refused = await post(gate.api, STREAM)
    assert (refused.status, refused.error["code"]) == (503, "no_endpoint")
    small.server.inject({"reset": True, "refuse": False})

    async def serves() -> bool:
        return (await post(gate.api, STREAM)).status == 200

    await eventually(serves)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_says_nothing(small: Engine, gate: Running, stream: bool) -> None:
    small.server.inject({"freeze": True})
    refused = await post(gate.api, chat(stream=stream, max_tokens=1))
    assert (refused.status, refused.error["code"]) == (504, "upstream_timeout")
    small.server.inject({"reset": True})
    await gate.idle()


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_an_engines_own_4xx_passes_byte_for_byte(status: int) -> None:
    body = b'{ "error" : {"message":"no such top_k", "code": 400} }'
    raw = json_response(None, status).replace(b"content-length: 4", b"content-length: %d" % len(body))[:-4] + body
    async with FakeUpstream(always(raw)) as upstream, running(configured([upstream.port])) as gate:
        for stream in (True, False):
            answer = await post(gate.api, chat(stream=stream))
            assert (answer.status, answer.body) == (status, body)
        assert len(posted(upstream)) == 2
        assert {record["outcome"] for record in await gate.logged(2)} == {"refused"}


@pytest.mark.parametrize(
    ("body", "kind"), [(b"", b"text/plain"), (b"\r\n", b"text/html"), (b"<h1>no</h1>", b"text/html")]
)
async def test_an_engines_own_4xx_that_is_no_json_is_not_called_json(body: bytes, kind: bytes) -> None:
    release = asyncio.Event()

    async def refuse(peer: Peer, request: Received) -> None:
        await release.wait()
        head = b"HTTP/1.1 422 X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (kind, len(body))
        await peer.send(head + body)

    async with (
        FakeUpstream(scripted(refuse)) as upstream,
        running(configured([upstream.port], keepalive="30ms")) as gate,
    ):
        async with connected(gate.api) as client:  # a comment has committed a stream: its events must be JSON
            client.post(STREAM)
            head = await client.head()
            assert await client.piece() == b": keepalive\n\n"
            release.set()
            *_, last = (await client.rest(head)).events()
            assert json.loads(last)["error"]["code"] == "engine_refused"
        answer = await post(gate.api, chat())
        assert answer.status == 422
        if body.strip():
            assert (answer.body, answer.headers["content-type"]) == (body, kind.decode())
        else:
            assert answer.headers["content-type"] == "application/json"
            assert (answer.error["code"], answer.error["type"]) == ("engine_refused", "invalid_request_error")


@pytest.mark.parametrize("stream", [True, False])
async def test_types_that_are_no_text_do_no_harm(stream: bool) -> None:
    odd: dict[str, Any] = {"type": [1], "error": None}
    raw = stream_response([event(odd), event({"type": {"a": 1}}), *WORDS]) if stream else json_response(odd)
    async with FakeUpstream(always(raw)) as upstream, running(configured([upstream.port])) as gate:
        answer = await post(gate.api, chat(stream=stream))
        assert answer.status == 200
        assert answer.done if stream else answer.json() == odd
        assert (await gate.logged())[0]["outcome"] == "ok"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "raw",
    [
        response(b"<html>login please</html>", kind="text/html"),
        response(b'{"choices": [], "usage": {"prompt_tok'),
        b"HTTP/1.1 204 No Content\r\n\r\n",
    ],
    ids=["html", "cut short", "no content"],
)
async def test_a_2xx_that_is_no_answer_is_a_failure(raw: bytes, stream: bool) -> None:
    async with FakeUpstream(always(raw)) as upstream, running(configured([upstream.port])) as gate:
        failed = await post(gate.api, chat(stream=stream))
        assert (failed.status, failed.error["code"]) == (502, "upstream_error")
        assert b"html" not in failed.body
        assert (await gate.logged())[0]["attempts"] == len(posted(upstream)) == 1
        await gate.idle()


async def test_a_stream_ends_at_done_though_the_engine_goes_on() -> None:
    async def on_and_on(peer: Peer, request: Received) -> None:
        await peer.send(STREAM_HEAD + chunk(b"".join(WORDS)))
        while True:
            await peer.send(chunk(WORDS[0]))
            await asyncio.sleep(0.005)

    async with FakeUpstream(scripted(on_and_on)) as upstream, running(configured([upstream.port])) as gate:
        answer = await asyncio.wait_for(post(gate.api, STREAM), 3.0)
        assert (answer.status, answer.text(), answer.events()[-1]) == (200, "Hello", "[DONE]")
        await gate.idle()
        called = next(peer for peer in upstream.peers if any(each.method == "POST" for each in peer.requests))
        await asyncio.wait_for(called.gone.wait(), 3.0)
        assert (await gate.logged())[0]["outcome"] == "ok"


async def test_a_plain_answer_that_trickles_is_given_up_in_time() -> None:
    async def trickle(peer: Peer, request: Received) -> None:
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            await peer.send(chunk(b" "))
            await asyncio.sleep(0.01)

    pools = {"small": {"timeouts": {"first_token": "200ms", "gap": "200ms"}, "slo": {"inter_token": "1ms"}}}
    async with FakeUpstream(scripted(trickle)) as upstream, running(configured([upstream.port], pools=pools)) as gate:
        failed = await asyncio.wait_for(post(gate.api, chat(max_tokens=10)), 3.0)
        assert (failed.status, failed.error["code"]) == (504, "upstream_timeout")
        await gate.idle()


@pytest.mark.parametrize(
    ("status", "body", "wanted"),
    [
        (401, {"error": {"message": "bad key sk-up-SECRET123 for http://10.1.2.3:8000"}}, 502),
        (403, {"error": "sk-up-SECRET123"}, 502),
        (500, "<html>Traceback /usr/lib/SECRET.py 10.1.2.3</html>", 502),
        (502, "SECRET", 502),
        (429, {"error": {"message": "SECRET 10.1.2.3"}}, 503),
        (503, {"error": {"message": "SECRET 10.1.2.3"}}, 503),
        (307, {}, 502),
    ],
)
async def test_what_an_engine_says_of_itself_stays_here(status: int, body: object, wanted: int) -> None:
    raw = json_response(body, status, extra="location: http://10.1.2.3/SECRET\r\nserver: SECRET\r\n")
    async with FakeUpstream(always(raw)) as upstream, running(configured([upstream.port])) as gate:
        refused = await post(gate.api, chat())
        assert refused.status == wanted
        for secret in ("SECRET", "sk-up", "10.1.2.3", str(upstream.port), "Traceback"):
            assert secret not in refused.body.decode() + str(refused.headers)
        assert "location" not in refused.headers


@pytest.mark.parametrize("status", [200, 400])
async def test_of_an_engines_headers_only_harmless_ones_pass(status: int) -> None:
    extra = "location: http://10.1.2.3/\r\nserver: uvicorn\r\nset-cookie: a=b\r\nx-tiergate-pool: mine\r\n"
    raw = json_response({"choices": []}, status, extra=extra + "endpoint-load-metrics: TEXT a=1\r\n")
    async with FakeUpstream(always(raw)) as upstream, running(configured([upstream.port])) as gate:
        answer = await post(gate.api, chat())
        assert answer.status == status
        assert not {"location", "server", "set-cookie"} & set(answer.headers)
        assert answer.headers["x-tiergate-pool"] == "small"


async def test_a_wait_with_comments_ends_in_the_truth() -> None:
    """A comment commits the 200; an engine that then fails, or refuses the call, is told inside the stream."""
    release = asyncio.Event()
    script: list[bytes] = [
        stream_response(WORDS),
        json_response({"error": {"message": "broken"}}, 500),
        json_response({"error": {"message": "no top_k"}}, 400),
    ]

    async def late(peer: Peer, request: Received) -> None:
        await release.wait()
        await peer.send(script.pop(0))

    async with (
        FakeUpstream(scripted(late)) as upstream,
        running(configured([upstream.port], keepalive="30ms", retry={"attempts": 1})) as gate,
    ):
        bodies = []
        while script:
            release.clear()
            async with connected(gate.api) as client:
                client.post(STREAM)
                head = await client.head()
                assert (head.status, head.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
                assert await client.piece() == b": keepalive\n\n"
                release.set()
                bodies.append((await client.rest(head)).body)
            await gate.idle()
        assert bodies[0].count(b"[DONE]") == 1
        assert b'"code":"upstream_error"' in bodies[1]
        assert b"no top_k" in bodies[2]
        assert b"[DONE]" not in bodies[1] + bodies[2]
        outcomes = [record["outcome"] for record in await gate.logged(3)]
        assert outcomes == ["ok", "failed", "refused"]


async def test_after_a_hundred_failures_nothing_is_left() -> None:
    """Half reset before any byte, a quarter in the middle of the body, a quarter good."""
    turns = iter(["rst", "rst", "half", "good"] * 25)

    async def answer(peer: Peer, request: Received) -> None:
        turn = next(turns)
        if turn == "rst":
            peer.reset()
        elif turn == "half":
            await peer.send(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{"id":')
            peer.reset()
        else:
            await peer.send(json_response({"choices": []}))

    async with FakeUpstream(scripted(answer)) as upstream:
        config = configured([upstream.port], retry={"attempts": 1}, health={"eject_after": 1000})
        async with running(config) as gate:
            seen = Counter([(await post(gate.api, chat())).status for _ in range(100)])
            assert seen == {502: 75, 200: 25}
            await gate.idle()
            assert (await gate.pool())["endpoints"][0]["in_flight"] == 0
