"""What engines' error answers mean, by recordings of vLLM 0.32 and by Retry-After in all its forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.upstream.verdict import Verdict, judge, rest_time

FIXTURES = Path(__file__).parent / "fixtures"
DATE = (b"date", b"Sun, 29 Nov 2026 10:00:00 GMT")


def recorded(name: str) -> tuple[int, bytes]:
    head, _, body = (FIXTURES / f"{name}.http").read_bytes().partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body


@pytest.mark.parametrize(
    ("name", "verdict", "status"),
    [
        ("drain_new_request_500", Verdict.DRAINING, 500),
        ("queue_full_503_nonstream", Verdict.BUSY, 503),
        ("err_prompt_too_long", Verdict.CLIENT, 400),
    ],
)
def test_recordings(name: str, verdict: Verdict, status: int) -> None:
    assert judge(*recorded(name)) == (verdict, status)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, b"", (Verdict.FINE, 200)),
        (429, b"", (Verdict.BUSY, 429)),
        (404, b"", (Verdict.CLIENT, 404)),
        (502, b"", (Verdict.DEAD, 502)),
        (500, b"oops", (Verdict.FAULT, 500)),
        (500, b'{"error":{"message":"EngineCore encountered an issue."}}', (Verdict.DEAD, 500)),
        (500, b'{"error":{"message":"input of 9000 tokens is over the 8192 limit"}}', (Verdict.CLIENT, 400)),
    ],
)
def test_statuses_and_texts(status: int, body: bytes, expected: tuple[Verdict, int]) -> None:
    assert judge(status, body) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        ([b"-5"], 0.0),
        ([b"1.5"], 1.5),
        ([b"1e9"], None),
        ([b"999999999999"], 60.0),
        ([b""], None),
        ([b"abc"], None),
        ([b"nan"], None),
        ([b"\xff"], None),
        ([b"Fri, 31 Dec 99999 23:59:59 GMT"], None),
        ([b"1", b"100"], 60.0),
        ([b"Sun, 29 Nov 2026 10:00:05 GMT"], 5.0),
        ([b"Sun, 29 Nov 2026 09:00:05 GMT"], 0.0),
    ],
)
def test_retry_after_is_0_to_60_seconds_or_nothing(values: list[bytes], expected: float | None) -> None:
    assert rest_time([DATE, *((b"retry-after", value) for value in values)]) == expected


def test_a_date_without_the_engines_own_clock_says_nothing() -> None:
    assert rest_time([(b"retry-after", b"Sun, 29 Nov 2026 10:00:05 GMT")]) is None
