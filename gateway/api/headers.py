"""Headers of an answer: what was decided about the call, and what is left of its tenant's limits."""

from __future__ import annotations

import math

from gateway.core.quota import Remaining
from gateway.core.types import Record

Header = tuple[bytes, bytes]


def decision_headers(record: Record) -> list[Header]:
    """x-request-id and the x-tiergate-* headers known so far; every value is the gateway's own or cleaned."""
    headers = [(b"x-request-id", record.id.encode())]
    for name, value in (
        (b"x-tiergate-pool", record.pool),
        (b"x-tiergate-tier", record.tier),
        (b"x-tiergate-route", record.why),
        (b"x-tiergate-band", record.band),
        (b"x-tiergate-release", record.release if record.pool else ""),
        (b"x-tiergate-clamped", record.clamped),
    ):
        if value:
            headers.append((name, value.encode()))
    if record.wait is not None:
        headers.append((b"x-tiergate-wait-ms", b"%d" % round(record.wait * 1000)))
    return headers


def limit_headers(remaining: tuple[Remaining | None, Remaining | None]) -> list[Header]:
    """x-ratelimit-{limit,remaining,reset}-{requests,tokens}, where the tenant is limited."""
    headers: list[Header] = []
    for unit, left in zip((b"requests", b"tokens"), remaining, strict=True):
        if left is not None:
            headers.append((b"x-ratelimit-limit-" + unit, b"%d" % left.limit))
            headers.append((b"x-ratelimit-remaining-" + unit, b"%d" % left.remaining))
            headers.append((b"x-ratelimit-reset-" + unit, b"%ds" % math.ceil(left.reset)))
    return headers
