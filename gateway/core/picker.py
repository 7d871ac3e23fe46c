"""Choose the endpoint of a pool for one call: the least busy for its weight, dice between equals."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from gateway.core.types import Endpoint, EndpointLoad


@dataclass(frozen=True, slots=True)
class Candidate:
    """An endpoint that may be picked; `in_flight` is the gateway's own count, `limit` None means no limit.

    `load` is what the engine last said of itself and None when unknown or stale.
    """

    endpoint: Endpoint
    in_flight: int
    limit: int | None = None
    load: EndpointLoad | None = None


def pick(
    candidates: Sequence[Candidate], dice: float, avoid: Set[str] = frozenset(), *, over: bool = False
) -> Endpoint | None:
    """The endpoint for the next call, or None if there is none with room.

    `dice` is in [0, 1). `avoid` holds names that must not be picked (already tried by this call). With `over`
    a full endpoint is better than none. An endpoint of weight 0 takes no traffic.
    """
    usable = [c for c in candidates if c.endpoint.weight > 0 and c.endpoint.name not in avoid]
    roomy = [c for c in usable if c.limit is None or c.in_flight < c.limit]
    if not roomy and over:
        roomy = usable
    if not roomy:
        return None
    least = min(_rank(c) for c in roomy)
    equals = [c for c in roomy if _rank(c) == least]
    return equals[min(int(dice * len(equals)), len(equals) - 1)].endpoint


def _rank(candidate: Candidate) -> tuple[float, float]:
    """Own count first: it is never late. Scraped waiting only parts equals, so a stale figure cannot draw a herd."""
    waiting = candidate.load.waiting if candidate.load else None
    return candidate.in_flight / candidate.endpoint.weight, waiting or 0.0
