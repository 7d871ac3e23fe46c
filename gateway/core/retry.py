"""Retry budget: second attempts are a bounded share of first ones, so an outage is not multiplied."""

from __future__ import annotations


class RetryBudget:
    """Each call earns `ratio` of a retry; `reserve` retries are there from the start and refill with time.

    `refill` is in retries per second and only fills up to `reserve`; earned retries are kept up to `most`.
    """

    def __init__(self, ratio: float = 0.1, reserve: float = 5.0, refill: float = 0.5, most: float = 100.0) -> None:
        self._ratio = ratio
        self._reserve = reserve
        self._refill = refill
        self._most = max(most, reserve)
        self._balance = reserve
        self._at: float | None = None

    def earn(self, now: float) -> None:
        """A first attempt was made at `now` (seconds)."""
        self._settle(now)
        self._balance = max(self._balance, min(self._balance + self._ratio, self._most))

    def spend(self, now: float) -> bool:
        """Take one retry; False if there is none to take."""
        self._settle(now)
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True

    def _settle(self, now: float) -> None:
        elapsed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        if self._balance < self._reserve:
            self._balance = min(self._reserve, self._balance + elapsed * self._refill)
