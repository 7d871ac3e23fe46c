"""What an engine's error means: the caller's fault, the engine is busy, draining, dead, or just failed."""

from __future__ import annotations

import re
from email.utils import parsedate_to_datetime
from enum import Enum

# Beginnings of answers that vLLM 0.32 and SGLang give; tests hold recordings of them.
_DRAINING = re.compile(rb"cannot schedule new futures after shutdown")
_DEAD = re.compile(rb"EngineCore encountered an issue|EngineDeadError")
_TOO_LONG = re.compile(
    rb"maximum context length|context length|longer than the maximum|is over the \d+ limit|too many (input )?tokens"
)
LONGEST_REST = 60.0
_SHOWN = 4096


class Verdict(Enum):
    """(says it something bad of the endpoint?, may another endpoint do better?)."""

    FINE = ("fine", False, False)
    CLIENT = ("client", False, False)
    BUSY = ("busy", False, True)
    DRAINING = ("draining", True, True)
    DEAD = ("dead", True, True)
    FAULT = ("fault", True, False)

    def __init__(self, label: str, bad: bool, elsewhere: bool) -> None:
        self.label = label
        self.bad = bad
        self.elsewhere = elsewhere


def judge(status: int, body: bytes) -> tuple[Verdict, int]:
    """What an answer of `status` with `body` means, and the status it should have had."""
    text = body[:_SHOWN]
    if status in (429, 503):
        return Verdict.BUSY, status
    if status < 500:
        return (Verdict.FINE if status < 400 else Verdict.CLIENT), status
    if _TOO_LONG.search(text):
        return Verdict.CLIENT, 400
    if _DRAINING.search(text):
        return Verdict.DRAINING, status
    dead = _DEAD.search(text) is not None or status in (502, 504)
    return (Verdict.DEAD if dead else Verdict.FAULT), status


def rest_time(headers: list[tuple[bytes, bytes]]) -> float | None:
    """Seconds (0 to 60) an engine asks to be left alone by Retry-After; None if it does not say so legibly.

    A date is taken relative to the answer's own Date: the engine's clock may differ from ours.
    """
    sent = next((value for name, value in headers if name == b"date"), None)
    rests = [_rest(value, sent) for name, value in headers if name == b"retry-after"]
    known = [rest for rest in rests if rest is not None]
    return max(known) if known else None


def _rest(value: bytes, sent: bytes | None) -> float | None:
    text = value.strip()
    if re.fullmatch(rb"-?\d{1,15}(\.\d{0,9})?", text):
        return min(max(float(text), 0.0), LONGEST_REST)
    try:
        then = parsedate_to_datetime(text.decode("ascii"))
        now = parsedate_to_datetime((sent or b"").decode("ascii"))
        return min(max((then - now).total_seconds(), 0.0), LONGEST_REST)
    except (ValueError, TypeError, OverflowError):
        return None
