"""Answers that are no answers, and answers that do not end: the relay tells them and lets go."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.core.types import Usage
from gateway.upstream.client import FailureKind, HttpClient, Outgoing, UpstreamFailed
from gateway.upstream.relay import LARGEST_LEAD, EngineError, Relay
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
    response,
    stream_response,
)

CALL = Outgoing(b"POST", b"/v1/chat/completions", (), b"{}")
WORDS = chat_events("Hel", "lo", usage=(7, 2))
WHOLE = json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}).encode()
PLAIN_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
WITHIN = 3.0


async def relayed(
    script: Script, *, stream: bool, first: float | None = 5.0, gap: float | None = 5.0
) -> tuple[bytes, Relay, int]:
    """(the bytes, the relay, how many connections are kept after it)."""
    loop = asyncio.get_running_loop()
    async with FakeUpstream(script) as engine:
        client = HttpClient("127.0.0.1", engine.port)
        answer = await client.send(CALL, first=first)
        answer.gap = gap
        relay = Relay(answer, stream=stream, hide_usage=False, clock=loop.time)
        parts = []
        try:
            await relay.open()
            while data := await relay.read():
                parts.append(data)
        finally:
            answer.close()
            kept = client.idle
            client.close()
        return b"".join(parts), relay, kept


def head_of(kind: str, length: int) -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n".encode()


# -- no answers ---------------------------------------------------------------------------------------------------

NO_ANSWERS = {
    "html": response(b"<html>login please</html>", kind="text/html"),
    "text": response(b"hello", kind="text/plain"),
    "html as json": response(b"<html>"),
    "empty": response(),
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "reset content": b"HTTP/1.1 205 Reset\r\ncontent-length: 0\r\n\r\n",
    "cut short by its length": head_of("application/json", len(WHOLE) - 9) + WHOLE,
    "a list": response(b"[1]"),
    "a number": response(b"1" * 5000),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("data", NO_ANSWERS.values(), ids=NO_ANSWERS)
async def test_a_2xx_that_is_no_json_object_is_no_answer(data: bytes, stream: bool) -> None:
    with pytest.raises(UpstreamFailed) as caught:
        await relayed(answers(data), stream=stream)
    assert caught.value.kind is FailureKind.PROTOCOL


async def test_events_for_a_plain_call_are_no_answer() -> None:
    with pytest.raises(UpstreamFailed) as caught:
        await relayed(answers(stream_response(WORDS)), stream=False)
    assert caught.value.kind is FailureKind.PROTOCOL


async def test_a_stream_without_a_content_type_is_still_a_stream() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    data = head + chunk(b"".join(WORDS)) + LAST_CHUNK
    assert (await relayed(answers(data), stream=True))[0] == b"".join(WORDS)


@pytest.mark.parametrize("value", [b'{"x": NaN, "y": -Infinity}', rb'{"x": "\ud800"}', b'{"x": %s}' % (b"9" * 4000)])
async def test_json_that_only_strict_readers_refuse_is_an_answer(value: bytes) -> None:
    assert (await relayed(answers(response(value)), stream=False))[0] == value


# -- answers that do not end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [b"", chunk(b": x\n\n"), chunk(WORDS[0])])
async def test_a_stream_ends_at_done_whatever_the_engine_does_then(after: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(b"".join(WORDS)))
        while after:
            await peer.send(after)
            await asyncio.sleep(0.005)
        await peer.client_left()

    out, relay, kept = await asyncio.wait_for(relayed(script, stream=True, first=None, gap=None), WITHIN)
    assert (out, kept) == (b"".join(WORDS), 0)
    assert relay.finished and not relay.failed and relay.failure is None


async def test_what_comes_after_done_in_the_same_packet_is_dropped() -> None:
    data = stream_response([b"".join(WORDS) + event({"error": {"message": "x"}}) + WORDS[0]])
    out, relay, kept = await relayed(answers(data), stream=True)
    assert (out, relay.failed, relay.events, relay.usage, kept) == (b"".join(WORDS), False, 4, Usage(7, 2), 1)


async def test_a_connection_whose_framing_ends_just_after_done_is_kept() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(b"".join(WORDS)))
        await asyncio.sleep(0.02)
        await peer.send(LAST_CHUNK)
        await peer.client_left()

    out, _, kept = await relayed(script, stream=True)
    assert (out, kept) == (b"".join(WORDS), 1)


async def test_data_after_the_final_event_does_not_hold_the_call_for_ever() -> None:
    """The messages format sends `[DONE]` after its final event, so that one does not close the stream yet."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(event({"type": "message_start"}) + event({"type": "message_stop"})))
        while True:
            await peer.send(chunk(event({"type": "ping"})))
            await asyncio.sleep(0.005)

    out, relay, _ = await asyncio.wait_for(relayed(script, stream=True, gap=0.1), WITHIN)
    assert relay.finished and relay.failure is None
    assert out.count(b"message_stop") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_plain_answer_that_trickles_ends_at_the_first_limit(stream: bool) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(PLAIN_HEAD)
        while True:
            await peer.send(chunk(b" "))
            await asyncio.sleep(0.01)

    with pytest.raises(UpstreamFailed) as caught:
        await asyncio.wait_for(relayed(script, stream=stream, first=0.2), WITHIN)
    assert caught.value.kind is FailureKind.TIMEOUT_FIRST


@pytest.mark.parametrize("first", [5.0, None])
async def test_silence_inside_a_plain_answer_is_a_gap(first: float | None) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(PLAIN_HEAD + chunk(b"{"))
        await peer.client_left()

    with pytest.raises(UpstreamFailed) as caught:
        await asyncio.wait_for(relayed(script, stream=False, first=first, gap=0.1), WITHIN)
    assert caught.value.kind is FailureKind.TIMEOUT_GAP


async def test_a_plain_answer_in_pieces_within_its_limit_is_whole() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(PLAIN_HEAD)
        for at in range(0, len(WHOLE), 8):
            await peer.send(chunk(WHOLE[at : at + 8]))
            await asyncio.sleep(0.01)
        await peer.send(LAST_CHUNK)
        await peer.client_left()

    assert (await relayed(script, stream=False))[::2] == (WHOLE, 1)


async def test_comments_before_the_first_event_are_not_hoarded() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        for _ in range(200):
            await peer.send(chunk((b": " + b"p" * 997 + b"\n\n") * 20))
        await peer.send(chunk(b": last\n\n") + chunk(b"".join(WORDS)) + LAST_CHUNK)
        await peer.client_left()

    out, relay, _ = await relayed(script, stream=True)
    assert out.endswith(b": last\n\n" + b"".join(WORDS))
    assert len(out) <= 4 * LARGEST_LEAD  # what is held, and one read
    assert relay.finished


# -- answers that lie ---------------------------------------------------------------------------------------------

ANYTHING = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(10**300, 10**330),
        st.floats(),
        st.text(st.characters(), max_size=5),
        st.sampled_from(["error", "message_stop", "response.failed", "400", "5xx", "\uff14\uff10\uff10", "overloaded"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


def any_of(**fields: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """An object with some of these fields, each as it should be or anything at all."""
    return st.one_of(
        st.fixed_dictionaries({}, optional={name: st.one_of(kind, ANYTHING) for name, kind in fields.items()}), ANYTHING
    )


COUNTS = {
    name: st.integers(-1, 10**320)
    for name in (
        *("prompt_tokens", "input_tokens", "completion_tokens", "output_tokens"),
        *("cache_read_input_tokens", "cache_creation_input_tokens"),
    )
}
USAGE = any_of(
    **COUNTS,
    prompt_tokens_details=any_of(cached_tokens=st.integers()),
    input_tokens_details=any_of(cached_tokens=st.integers()),
)
ENGINE_SAYS = any_of(
    type=st.sampled_from(["error", "message_stop"]),
    error=any_of(code=st.integers(), type=st.text(), message=st.text()),
    delta=any_of(stop_reason=st.text()),
    choices=st.lists(any_of(finish_reason=st.text(), delta=ANYTHING), max_size=3),
    usage=USAGE,
    response=any_of(usage=USAGE, error=ANYTHING),
    message=any_of(usage=USAGE),
)


class Said:
    """An answer that is already here."""

    def __init__(self, kind: bytes, pieces: list[bytes]) -> None:
        self.status = 200
        self.headers = [(b"content-type", kind)]
        self.gap: float | None = None
        self.clean_end = True
        self._pieces = pieces

    def alive(self) -> None:
        """No clock."""

    piece = alive

    async def read(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


async def heard(kind: bytes, pieces: list[bytes], *, stream: bool, hide: bool) -> Relay | None:
    """The relay, read to its end; None if it failed as it may fail."""
    ticks = iter(range(10**6))
    relay = Relay(Said(kind, pieces), stream=stream, hide_usage=hide, clock=lambda: float(next(ticks)))
    try:
        await relay.open()
        while await relay.read():
            pass
    except (UpstreamFailed, EngineError):
        return None
    return relay


@settings(max_examples=150, deadline=None)
@given(st.lists(ENGINE_SAYS, min_size=1, max_size=4), st.booleans())
@example([{"type": [1]}], False)
@example([{"type": {"a": 1}}, {"choices": [{"finish_reason": "stop"}]}], False)
@example([{"choices": [], "usage": {"completion_tokens": 10**310}}, {"choices": []}], True)
def test_whatever_the_fields_hold_only_known_failures_come_of_it(said: list[object], hide: bool) -> None:
    texts = [json.dumps(value).encode() for value in said]

    async def all_heard() -> list[Relay | None]:
        wholes = [await heard(b"application/json", [text], stream=False, hide=hide) for text in texts]
        events = [*map(event, texts), event(b"[DONE]")]
        return [*wholes, await heard(b"text/event-stream", events, stream=True, hide=hide)]

    for relay in filter(None, asyncio.run(all_heard())):
        assert relay.inter_token is None or relay.inter_token >= 0.0
        assert relay.usage is None or 0 <= relay.usage.prompt + relay.usage.completion < 1 << 50
