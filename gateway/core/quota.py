"""Quota arithmetic of one tenant: one decision over all limits, all or nothing; reserve, then settle.

Each limit is a GCRA (generic cell rate algorithm): one number, the time at which the bucket is empty again. It
needs no window edges, gives an exact time until a cost fits, and takes refunds and debt.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.refusal import Reason, Refusal
from gateway.core.types import Call, Limits, Rate, Usage

_CONCURRENCY_RETRY = 1.0


class Bucket:
    """One rate limit: `rate.amount` may be spent at once and flows back evenly over `rate.period` seconds."""

    __slots__ = ("_empty_at", "rate")

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self._empty_at = 0.0

    def used(self, now: float) -> float:
        """Units spent and not yet flowed back."""
        return max(0.0, self._empty_at - now) * self.rate.amount / self.rate.period

    def remaining(self, now: float) -> float:
        """Units that may be spent now; never negative."""
        return max(0.0, self.rate.amount - self.used(now))

    def until_fits(self, cost: float, now: float) -> float:
        """Seconds until `cost` may be spent: 0 now, infinity if it never fits."""
        if cost > self.rate.amount:
            return float("inf")
        over = self.used(now) + cost - self.rate.amount
        # A billionth of a unit of float error must not turn "fits exactly" into a refusal.
        return max(0.0, over) * self.rate.period / self.rate.amount if over > 1e-9 else 0.0

    def until_full(self, now: float) -> float:
        """Seconds until nothing is spent any more."""
        return max(0.0, self._empty_at - now)

    def spend(self, cost: float, now: float) -> None:
        """Take `cost` units, into debt if need be; a negative cost gives units back."""
        if self.rate.amount > 0:
            self._empty_at = max(self._empty_at, now) + cost * self.rate.period / self.rate.amount


@dataclass(frozen=True, slots=True)
class Reserved:
    """What a call holds: worst case in tokens, until it is settled."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Remaining:
    """One line of the x-ratelimit headers: units, units, seconds."""

    limit: int
    remaining: int
    reset: float


class Meter:
    """All limits of one tenant."""

    __slots__ = ("_budget", "_requests", "_tokens", "concurrent", "limits")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.concurrent = 0
        self._requests = Bucket(limits.requests) if limits.requests else None
        self._tokens = Bucket(limits.tokens) if limits.tokens else None
        self._budget = Bucket(limits.budget) if limits.budget else None

    def reserve(self, call: Call, now: float) -> Reserved | Refusal:
        """Hold the worst case of `call`, all or nothing, or say which limit does not allow it and when it will."""
        cost = worst_case(call)
        refusal = self._over_concurrency() or self._over_rate(cost, now)
        if refusal:
            return refusal
        self.concurrent += 1
        self._spend(1, cost, now)
        return Reserved(cost)

    def settle(self, reserved: Reserved, usage: Usage | None, now: float) -> None:
        """Give the difference back (or charge it, even into debt); `usage` None: the call was never served."""
        self.concurrent -= 1
        if usage is None:
            self._spend(-1, -reserved.tokens, now)
        else:
            self._spend(0, usage.total - reserved.tokens, now)

    def remaining(self, now: float) -> tuple[Remaining | None, Remaining | None]:
        """Requests and tokens left, where limited."""
        return _left(self._requests, now), _left(self._tokens, now)

    def _over_concurrency(self) -> Refusal | None:
        most = self.limits.concurrent
        if most is None or self.concurrent < most:
            return None
        return Refusal(
            Reason.TENANT_CONCURRENCY,
            f"{self.concurrent} of your requests are in progress, at most {most} are allowed at once.",
            retry_after=_CONCURRENCY_RETRY if most > 0 else None,
        )

    def _over_rate(self, cost: int, now: float) -> Refusal | None:
        for bucket, amount, reason, unit in (
            (self._requests, 1, Reason.TENANT_REQUESTS, "requests"),
            (self._tokens, cost, Reason.TENANT_TOKENS, "tokens"),
            (self._budget, cost, Reason.TENANT_BUDGET, "budget tokens"),
        ):
            if bucket is None:
                continue
            wait = bucket.until_fits(amount, now)
            if wait > 0:
                return _refused(bucket, amount, wait, reason, unit)
        return None

    def _spend(self, requests: int, tokens: int, now: float) -> None:
        if self._requests and requests:
            self._requests.spend(requests, now)
        for bucket in (self._tokens, self._budget):
            if bucket and tokens:
                bucket.spend(tokens, now)


def worst_case(call: Call) -> int:
    """Most tokens `call` can use: the prompt, and max_tokens for each sequence."""
    return call.prompt.tokens + call.choices * (call.max_tokens or 0)


def _refused(bucket: Bucket, amount: int, wait: float, reason: Reason, unit: str) -> Refusal:
    rate = bucket.rate
    per = f"{rate.amount:,.0f} {unit} per {rate.period:,.0f} s"
    if wait == float("inf") and rate.amount > 0:
        return Refusal(
            Reason.REQUEST_EXCEEDS_QUOTA,
            f"This request may use up to {amount:,} tokens, more than your whole limit of {per}. "
            "Lower max_tokens or shorten the input.",
            param="max_tokens",
        )
    retry = None if wait == float("inf") else wait
    return Refusal(reason, f"Your limit of {per} is used up.", retry_after=retry)


def _left(bucket: Bucket | None, now: float) -> Remaining | None:
    if bucket is None:
        return None
    return Remaining(int(bucket.rate.amount), int(bucket.remaining(now)), bucket.until_full(now))
