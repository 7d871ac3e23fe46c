"""Refusals and failures in OpenAI's error shape, and the headers that tell a client when to come back."""

from __future__ import annotations

import math

import msgspec

from gateway.core.refusal import Reason, Refusal

_JITTER = 0.5
_POINTLESS = 120.0  # s; official clients give up beyond this anyway


def error_body(reason: Reason, message: str, param: str | None = None) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`."""
    return msgspec.json.encode(
        {"error": {"message": message, "type": reason.kind, "param": param, "code": reason.code}}
    )


def error_event(reason: Reason, message: str) -> bytes:
    """The same as an event of a stream that had begun."""
    return b"data: " + error_body(reason, message) + b"\n\n"


def retry_headers(refusal: Refusal, dice: float) -> list[tuple[bytes, bytes]]:
    """x-tiergate-reason, retry-after, retry-after-ms, x-should-retry; `dice` (0..1) spreads those who come back.

    The jitter is added here because the official client obeys Retry-After to the millisecond: without it everybody
    who was shed together returns together.
    """
    headers = [(b"x-tiergate-reason", refusal.reason.code.encode())]
    if refusal.retry_after is not None:
        wait = refusal.retry_after * (1.0 + _JITTER * dice)
        headers.append((b"retry-after", b"%d" % math.ceil(wait)))
        headers.append((b"retry-after-ms", b"%d" % math.ceil(wait * 1000)))
    if not refusal.reason.retryable or refusal.retry_after is None or refusal.retry_after > _POINTLESS:
        headers.append((b"x-should-retry", b"false"))
    return headers
