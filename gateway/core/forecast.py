"""When a call that waits now will see its first token, and when it makes sense to come back."""

from __future__ import annotations

from gateway.core.drain import DrainRate

_SMOOTHING = 0.1
_LONGEST_RETRY = 30.0
_BLIND_RETRY = 2.0


class Forecast:
    """Learns from finished calls how fast slots come free and how long an engine takes to a first token."""

    __slots__ = ("_drain", "_held", "first_token")

    def __init__(self) -> None:
        self._drain = DrainRate()
        self._held: float | None = None  # smoothed, s that a slot is held
        self.first_token = 0.0  # smoothed, s from dispatch

    def freed(self, slots: int, held: float, now: float) -> None:
        """`slots` came free at `now` (s), after `held` seconds."""
        self._drain.add(now, slots)
        self._held = held if self._held is None else self._held + _SMOOTHING * (held - self._held)

    def seen(self, first_token: float) -> None:
        """An engine took `first_token` seconds from dispatch to the first token."""
        self.first_token += _SMOOTHING * (first_token - self.first_token)

    def wait(self, slots: float, now: float, places: int) -> float | None:
        """Seconds until `slots` more have come free of `places` that are all taken; None while that is unknown."""
        if slots <= 0:
            return 0.0
        rate = self._drain.per_second(now) or 0.0
        if self._held and rate:
            # A pool that was not full freed only what was asked of it; full, it frees this much (Little's law).
            rate = max(rate, places / self._held)
        return slots / rate if rate else None

    def retry_after(self, slots: float, now: float, places: int) -> float:
        """Seconds until a line of `slots` has drained, within 1..30; 2 while the rate is unknown."""
        wait = self.wait(slots, now, places)
        return _BLIND_RETRY if wait is None else min(_LONGEST_RETRY, max(1.0, wait))
