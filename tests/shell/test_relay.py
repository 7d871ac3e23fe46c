"""One answer from engine to client: committed late, byte for byte, and never a false success."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.core.types import Usage
from gateway.upstream.client import FailureKind, HttpClient, Outgoing, UpstreamFailed
from gateway.upstream.relay import EngineError, Relay
from gateway.upstream.verdict import Verdict
from tests.fakes.upstream import (
    LAST_CHUNK,
    STREAM_HEAD,
    FakeUpstream,
    Peer,
    Script,
    answers,
    chat_events,
    chunk,
    event,
    json_response,
    response,
    stream_response,
    until,
)

FIXTURES = Path(__file__).parent / "fixtures"
CALL = Outgoing(b"POST", b"/v1/chat/completions", (), b"{}")
WORDS = chat_events("Hel", "lo", usage=(7, 2))


@asynccontextmanager
async def relayed(
    script: Script,
    *,
    stream: bool = True,
    hide_usage: bool = False,
    first: float | None = None,
    gap: float | None = None,
    progress: list[float] | None = None,
    largest: int = 1 << 26,
) -> AsyncIterator[Relay]:
    loop = asyncio.get_running_loop()
    async with FakeUpstream(script) as engine:
        client = HttpClient("127.0.0.1", engine.port)
        answer = await client.send(CALL, first=first)
        answer.gap = gap
        try:
            yield Relay(
                answer,
                stream=stream,
                hide_usage=hide_usage,
                clock=loop.time,
                on_progress=None if progress is None else progress.append,
                largest=largest,
            )
        finally:
            answer.close()
            client.close()


async def everything(relay: Relay) -> bytes:
    await relay.open()
    parts = []
    while data := await relay.read():
        parts.append(data)
    return b"".join(parts)


async def broken(relay: Relay) -> tuple[bytes, FailureKind]:
    """(what the client got, how it ended)."""
    parts = []
    with pytest.raises(UpstreamFailed) as caught:
        await relay.open()
        while data := await relay.read():
            parts.append(data)
    assert relay.failure is caught.value
    return b"".join(parts), caught.value.kind


def sending(data: bytes, *, bytewise: bool = False, reset: bool = False) -> Script:
    """Send `data` and end the connection."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await (peer.send_bytewise(data) if bytewise else peer.send(data))
        if reset:
            await asyncio.sleep(0.05)  # a RST may overtake bytes that the client has not read
            peer.reset()

    return script


def recorded(name: str) -> bytes:
    return (FIXTURES / f"{name}.http").read_bytes()


def body_of(name: str) -> bytes:
    """The recorded body, without its chunk framing."""
    rest = recorded(name).partition(b"\r\n\r\n")[2]
    out = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        out, rest = out + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return out


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        ("chat_stream_usage", Usage(21, 8)),
        ("chat_stream_usage_continuous", Usage(21, 8)),
        ("comp_stream", None),
        ("messages_stream", Usage(21, 8)),
        ("responses_stream", Usage(21, 8)),
    ],
)
async def test_recorded_streams_pass_byte_for_byte_and_are_accounted_for(name: str, usage: Usage | None) -> None:
    async with relayed(sending(recorded(name))) as relay:
        assert await everything(relay) == body_of(name)
        assert (relay.usage, relay.finished, relay.failed) == (usage, True, False)
        assert relay.first_token_at is not None


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        ("chat_prefix_cache_second", Usage(492, 8, 384)),
        ("messages_basic", Usage(21, 8)),
        ("responses_basic", Usage(21, 8)),
    ],
)
async def test_recorded_whole_answers(name: str, usage: Usage) -> None:
    body = recorded(name).partition(b"\r\n\r\n")[2]
    async with relayed(sending(recorded(name)), stream=False) as relay:
        assert await everything(relay) == relay.body == body
        assert (relay.usage, relay.finished, relay.failed, relay.status) == (usage, True, False, 200)


async def test_a_stream_sent_byte_by_byte() -> None:
    events = chat_events("你好🚀é", "a\u2028b\u0085c", usage=(7, 2))
    async with relayed(sending(stream_response(events), bytewise=True)) as relay:
        assert await everything(relay) == b"".join(events)
        assert (relay.usage, relay.events) == (Usage(7, 2), 4)


async def test_the_usage_chunk_that_only_the_gateway_wanted_is_left_out() -> None:
    async with relayed(sending(stream_response(WORDS)), hide_usage=True) as relay:
        assert await everything(relay) == b"".join(WORDS[:3] + WORDS[4:])
        assert relay.usage == Usage(7, 2)


async def test_open_waits_for_data_not_for_headers_or_comments() -> None:
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(b": keep-alive\n\n"))
        await go.wait()
        await peer.send(chunk(b"".join(WORDS)) + LAST_CHUNK)

    async with relayed(script) as relay:
        opening = asyncio.ensure_future(relay.open())
        await asyncio.sleep(0.05)
        assert not opening.done() and relay.first_token_at is None
        go.set()
        await opening
        assert await relay.read() == b": keep-alive\n\n" + b"".join(WORDS)
        assert await relay.read() == b""


async def test_comments_do_not_stretch_the_limit_on_the_first_token() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        while True:
            await peer.send(chunk(b": keep-alive\n\n"))
            await asyncio.sleep(0.01)

    async with relayed(script, first=0.1) as relay:
        assert await broken(relay) == (b"", FailureKind.TIMEOUT_FIRST)


async def test_comments_do_not_stretch_the_gap_between_tokens() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(WORDS[0]))
        while True:
            await peer.send(chunk(b": keep-alive\n\n"))
            await asyncio.sleep(0.01)

    async with relayed(script, first=5.0, gap=0.1) as relay:
        out, kind = await broken(relay)
        assert out.startswith(WORDS[0]) and kind is FailureKind.TIMEOUT_GAP


async def test_silence_after_tokens_is_noticed_though_an_earlier_timer_was_set() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(WORDS[0]))
        await peer.client_left()

    async with relayed(script, first=0.05, gap=0.15) as relay:
        out, kind = await asyncio.wait_for(broken(relay), 3.0)
        assert (out, kind) == (WORDS[0], FailureKind.TIMEOUT_GAP)


async def test_tokens_move_the_gap_on() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        for data in WORDS:
            await peer.send(chunk(data))
            await asyncio.sleep(0.08)
        await peer.send(LAST_CHUNK)

    async with relayed(script, first=0.3, gap=0.3) as relay:
        assert await everything(relay) == b"".join(WORDS)
        assert relay.inter_token is not None and relay.gap is not None
        assert 0.07 < relay.gap < 0.25 and 0.15 < relay.inter_token < 0.7


@pytest.mark.parametrize(
    ("name", "status", "verdict"),
    [("queue_full_inband_503_in_200_stream", 503, Verdict.BUSY)],
)
async def test_a_stream_that_begins_with_an_error_has_that_status(name: str, status: int, verdict: Verdict) -> None:
    async with relayed(sending(recorded(name))) as relay:
        with pytest.raises(EngineError) as caught:
            await relay.open()
        error = caught.value
        assert (error.status, error.retryable, error.verdict) == (status, True, verdict)
        assert json.loads(error.body)["error"]["code"] == status


async def test_a_callers_fault_told_inside_a_stream_is_not_retryable() -> None:
    data = stream_response([event({"error": {"message": "bad", "code": 400}}), event(b"[DONE]")])
    async with relayed(sending(data)) as relay:
        with pytest.raises(EngineError) as caught:
            await relay.open()
        assert (caught.value.status, caught.value.retryable) == (400, False)


async def test_an_error_event_in_the_middle_passes_and_counts_as_failure() -> None:
    progress: list[float] = []
    name = "kill_enginecore_sigkill_stream"
    async with relayed(sending(recorded(name)), progress=progress) as relay:
        # Sent in one piece the error is here before anything is committed: it becomes a status.
        with pytest.raises(EngineError):
            await relay.open()
    go = asyncio.Event()
    tail = event({"error": {"message": "EngineCore encountered an issue", "code": 500}}) + event(b"[DONE]")

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(WORDS[0]))
        await go.wait()
        await peer.send(chunk(tail) + LAST_CHUNK)

    async with relayed(script, progress=progress) as relay:
        await relay.open()
        go.set()
        assert await everything(relay) == WORDS[0] + tail
        assert relay.failed and relay.verdict is Verdict.DEAD
        assert len(progress) == 1


@pytest.mark.parametrize("reset", [False, True])
async def test_a_stream_cut_in_the_middle_delivers_whole_events_then_fails(reset: bool) -> None:
    data = STREAM_HEAD + chunk(WORDS[0]) + chunk(WORDS[1]) + chunk(WORDS[2][:20])
    async with relayed(sending(data, reset=reset)) as relay:
        assert await broken(relay) == (WORDS[0] + WORDS[1], FailureKind.CUT)
        assert not relay.finished


@pytest.mark.parametrize("head", [STREAM_HEAD + LAST_CHUNK, STREAM_HEAD])
async def test_a_stream_without_any_event_fails_before_anything_is_committed(head: bytes) -> None:
    async with relayed(sending(head)) as relay:
        with pytest.raises(UpstreamFailed):
            await relay.open()


@pytest.mark.parametrize("framed", [True, False])
async def test_a_polite_end_without_a_finish_reason_is_no_success(framed: bool) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    data = stream_response(WORDS[:2]) if framed else head + b"".join(WORDS[:2])
    async with relayed(sending(data)) as relay:
        assert await broken(relay) == (b"".join(WORDS[:2]), FailureKind.CUT)


async def test_once_done_was_sent_the_end_of_the_connection_does_not_matter() -> None:
    data = STREAM_HEAD + b"".join(chunk(piece) for piece in WORDS)
    async with relayed(sending(data)) as relay:
        assert await everything(relay) == b"".join(WORDS)
        assert relay.finished and relay.failure is None


async def test_a_last_event_without_its_blank_line_still_counts() -> None:
    body = b"".join(WORDS)[:-1]
    async with relayed(sending(stream_response([body]))) as relay:
        assert await everything(relay) == body
        assert relay.finished


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_status_is_kept_with_its_body_byte_for_byte(stream: bool) -> None:
    body = b'{"error": {"message":"x" } }'
    async with relayed(answers(response(body, 404)), stream=stream) as relay:
        assert await everything(relay) == body
        assert (relay.status, relay.body, relay.verdict, relay.finished) == (404, body, Verdict.CLIENT, False)


async def test_a_json_answer_to_a_stream_request_is_a_whole_answer() -> None:
    value = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
    async with relayed(answers(json_response(value))) as relay:
        assert json.loads(await everything(relay)) == value
        assert not relay.streaming and relay.usage == Usage(3, 4)


async def test_half_a_json_document_at_the_end_of_a_connection_is_cut() -> None:
    data = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"usage": {"prompt'
    async with relayed(sending(data), stream=False) as relay:
        assert (await broken(relay))[1] is FailureKind.CUT


@pytest.mark.parametrize("stream", [True, False])
async def test_compressed_answers_are_decoded_once(stream: bool) -> None:
    body = b"".join(WORDS) if stream else b'{"usage":{"prompt_tokens":7,"completion_tokens":2}}'
    kind = "text/event-stream" if stream else "application/json"
    data = response(gzip.compress(body), kind=kind, extra="content-encoding: gzip\r\n")
    async with relayed(sending(data), stream=stream) as relay:
        assert await everything(relay) == body
        assert relay.usage == Usage(7, 2)
        assert relay.headers == [(b"content-type", kind.encode())]


BAD_GZIP = {
    "cut short": gzip.compress(b"x" * 100)[:-10],
    "not gzip": b"not gzip",
    "absurd": gzip.compress(b"x" * 40_000_000),
}


@pytest.mark.parametrize("body", BAD_GZIP.values(), ids=BAD_GZIP)
async def test_broken_or_absurd_compression_fails(body: bytes) -> None:
    data = response(body, extra="content-encoding: gzip\r\n")
    async with relayed(sending(data), stream=False) as relay:
        with pytest.raises(UpstreamFailed):
            await relay.open()


async def test_a_coding_we_cannot_undo_fails() -> None:
    with pytest.raises(UpstreamFailed):
        async with relayed(answers(response(b"x", extra="content-encoding: br\r\n"))):
            pass


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_is_too_large_is_given_up(stream: bool) -> None:
    data = stream_response([b"data: " + b"x" * 5000]) if stream else response(b"x" * 5000)
    async with relayed(sending(data), stream=stream, largest=4000) as relay:
        assert (await broken(relay))[1] is FailureKind.PROTOCOL


async def test_megabytes_in_one_event() -> None:
    events = chat_events("x" * 3_000_000, "y", usage=(7, 2))
    async with relayed(sending(stream_response(events))) as relay:
        assert await everything(relay) == b"".join(events)
        assert relay.usage == Usage(7, 2)


async def test_a_stream_cancelled_twice_while_reading_frees_the_engine() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(WORDS[0]))
        await peer.client_left()

    loop = asyncio.get_running_loop()
    async with FakeUpstream(script) as engine:
        client = HttpClient("127.0.0.1", engine.port)

        async def call() -> None:
            answer = await client.send(CALL)
            try:
                await everything(Relay(answer, stream=True, hide_usage=False, clock=loop.time))
            finally:
                answer.close()

        tasks = [asyncio.ensure_future(call()) for _ in range(10)]
        await until(lambda: len(engine.requests) == 10)
        for task in tasks:
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait(tasks)
        await asyncio.wait_for(asyncio.gather(*(peer.gone.wait() for peer in engine.peers)), 5.0)
        assert client.active == 0
        client.close()
