"""Events cut out of bytes: the same bytes and the same account, wherever the packets end."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.core.types import Usage
from gateway.upstream.sse import EventTooLarge, Scanner
from tests.fakes.upstream import chat_events, event

USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
FINISH = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE_ONLY = {"choices": [], "usage": USAGE}


def word(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more}


def account(scanner: Scanner) -> tuple[object, ...]:
    s = scanner
    return s.events, s.first_at, s.usage, s.finished, s.done, s.error


def scanned(data: bytes, cuts: list[int] | None = None, hide_usage: bool = False) -> tuple[bytes, Scanner]:
    scanner = Scanner(hide_usage=hide_usage)
    edges = [0, *sorted(cuts or []), len(data)]
    out = b"".join(scanner.feed(data[a:b]) for a, b in pairwise(edges))
    return out + scanner.finish(), scanner


PIECES = st.sampled_from(
    [
        event(word("hi")),
        event(word("你好🚀é\u2028\u0085")),
        event(word('"usage" "error" "finish_reason":"stop" [DONE]')),
        event(FINISH),
        event(USAGE_ONLY),
        event(word("x", usage=USAGE)),
        event(word("x", usage=None)),
        event({"error": {"message": "no", "code": 503}}),
        event(b"[DONE]"),
        b"data:[DONE]\n\n",
        b"data:" + json.dumps(word("no space")).encode() + b"\n\n",
        b": keep-alive\n\n",
        b"\n",
        b"\n\n",
        b"event: ping\nid: 7\nretry: 5\n\n",
        b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},'
        b'"usage":{"output_tokens":4}}\n\n',
        b'data: {"choices":[],\ndata: "usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n',
        b"data: not json\n\n",
        b"data\n\n",
        b"data: half",
    ]
)
STREAMS = st.tuples(st.lists(PIECES, max_size=12), st.sampled_from([b"\n", b"\r\n", b"\r"])).map(
    lambda drawn: b"".join(drawn[0]).replace(b"\n", drawn[1])
)


@settings(max_examples=300)
@given(STREAMS, st.booleans(), st.lists(st.integers(0, 3000), max_size=20))
@example((event(word("a")) + event(USAGE_ONLY) + event(FINISH)).replace(b"\n", b"\r\n"), True, [])
@example(event(USAGE_ONLY).replace(b"\n", b"\r\n") + event(USAGE_ONLY), True, [])
@example(event(word("a")).replace(b"\n", b"\r") + b"\n\n" + event(USAGE_ONLY), True, [])
def test_any_split_gives_the_same_bytes_and_the_same_account(stream: bytes, hide: bool, cuts: list[int]) -> None:
    out, scanner = scanned(stream, hide_usage=hide)
    for split in ([min(cut, len(stream)) for cut in cuts], list(range(len(stream)))):
        other_out, other = scanned(stream, split, hide)
        assert account(other) == account(scanner)
        assert other_out == out
    if not hide:
        assert out == (stream[: len(out)] if scanner.closed else stream)
    assert not scanner.closed or out.rstrip(b"\r\n").endswith(b"[DONE]")


@given(STREAMS)
def test_line_ends_make_no_difference_to_the_account(stream: bytes) -> None:
    plain = stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    first, second = account(scanned(stream)[1]), account(scanned(plain)[1])
    assert first[:1] + first[2:] == second[:1] + second[2:]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_whole_events_leave_at_once_and_unfinished_ones_wait(end: bytes) -> None:
    scanner = Scanner()
    first = event(word("a")).replace(b"\n", end)
    out = scanner.feed(first + b"data: {")
    assert out == first and scanner.events == 1
    assert scanner.feed(b'"x":1}' + end) == b""
    assert scanner.feed(end) == b'data: {"x":1}' + end + end
    assert scanner.events == 2


def test_an_ordinary_stream() -> None:
    stream = b"".join(chat_events("Hel", "lo", usage=(7, 2)))
    out, scanner = scanned(stream)
    assert out == stream
    assert account(scanner) == (4, 0, Usage(7, 2), True, True, None)


def test_what_stands_between_events_of_text_is_no_event() -> None:
    for between in (b": keep-alive\n\n", b"\n\n", b"id: 4\n\n"):
        _, scanner = scanned(event(word("a")) + between + event(word("b")))
        assert scanner.events == 2 and not scanner.done, between


def test_nothing_passes_after_done() -> None:
    whole = event(word("a")) + event(b"[DONE]")
    for after in (event(word("b")), b": x\n\n", event({"error": 1}), b"data: half"):
        for cuts in ([], [len(whole)]):
            out, scanner = scanned(whole + after, cuts)
            assert out == whole
            assert account(scanner) == (1, 0, None, True, True, None)


def test_only_the_usage_chunk_is_hidden() -> None:
    events = chat_events("Hel", "lo", usage=(7, 2))
    events.insert(2, b": keep-alive\n\n")
    events.insert(1, event({"choices": [], "prompt_filter_results": []}))
    events.insert(2, event(word("x", usage=USAGE)))
    out, scanner = scanned(b"".join(events), hide_usage=True)
    assert out == b"".join(data for data in events if b'"choices":[],"usage"' not in data)
    assert scanner.usage == Usage(7, 2) and len(events) == 8


def test_text_that_looks_like_protocol_fools_nobody() -> None:
    text = 'data: [DONE]\n\n{"error": 1, "usage": {"prompt_tokens": 9}} "finish_reason":"stop"'
    _, scanner = scanned(event(word(text)) + event(word("[DONE]")))
    assert account(scanner) == (2, 0, None, False, False, None)


def test_line_separators_of_unicode_are_text() -> None:
    data = event({"choices": [{"delta": {"content": "a\u2028b\u0085c"}, "finish_reason": "stop"}], "usage": USAGE})
    out, scanner = scanned(data)
    assert (out, scanner.usage, scanner.finished, scanner.events) == (data, Usage(2, 3), True, 1)


@pytest.mark.parametrize(
    ("value", "failed"),
    [
        ({"error": {"message": "x", "code": 500}}, True),
        ({"error": "overloaded", "error_type": "x"}, True),
        ({"type": "error", "error": {"type": "overloaded_error"}}, True),
        ({"type": "response.failed", "response": {"error": {"code": "x"}}}, True),
        ({"error": None, "choices": []}, False),
        ({"choices": [{"delta": {"content": '{"error": 1}'}}]}, False),
    ],
)
def test_error_events(value: dict[str, Any], failed: bool) -> None:
    _, scanner = scanned(event(value))
    assert scanner.failed is failed
    assert scanner.error == (event(value)[6:-2] if failed else None)


def test_an_event_named_error_is_an_error_whatever_it_holds() -> None:
    assert scanned(b"event: error\ndata: it broke\n\n")[1].error == b"it broke"


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}, Usage(9, 1, 4)),
        ({"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": None}, Usage(9, 1)),
        ({"input_tokens": 9, "output_tokens": 1, "input_tokens_details": {"cached_tokens": 4}}, Usage(9, 1, 4)),
        (
            {
                "input_tokens": 76,
                "output_tokens": 5,
                "cache_read_input_tokens": 100,
                "cache_creation_input_tokens": 28,
            },
            Usage(204, 5, 100),
        ),
        ({"prompt_tokens": -1, "completion_tokens": "3"}, None),
        ({"prompt_tokens": True}, None),
        ({}, None),
    ],
)
def test_usage_in_every_shape(usage: dict[str, Any], expected: Usage | None) -> None:
    assert scanned(event({"choices": [], "usage": usage}))[1].usage == expected


def test_the_last_usage_wins_and_keeps_what_it_leaves_out() -> None:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 12, "output_tokens": 0}}}
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 4}}
    assert scanned(event(start) + event(end))[1].usage == Usage(12, 4)


def test_megabytes_in_one_event_cost_their_length_once() -> None:
    big = event(word("x" * 3_000_000))
    scanner = Scanner()
    out = b"".join(scanner.feed(big[at : at + 300]) for at in range(0, len(big), 300))
    assert out == big and scanner.events == 1


def test_an_event_without_end_is_given_up() -> None:
    scanner = Scanner(largest=1000)
    scanner.feed(b"data: " + b"x" * 990)
    with pytest.raises(EventTooLarge):
        scanner.feed(b"x" * 10)


def test_offset_of_the_first_event_with_data() -> None:
    assert scanned(b": hello\n\n\n" + event(FINISH))[1].first_at == 10
