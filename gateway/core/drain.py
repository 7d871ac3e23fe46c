"""How fast a pool frees slots: a rate over the last seconds, in constant memory."""

from __future__ import annotations

WINDOW = 10
_ENOUGH = 5


class DrainRate:
    """Counts events in one-second cells over the last `WINDOW` seconds."""

    __slots__ = ("_cells", "_first", "_second")

    def __init__(self) -> None:
        self._cells = [0] * WINDOW
        self._second = 0
        self._first: float | None = None

    def add(self, now: float, count: int = 1) -> None:
        """`count` slots came free at `now` (s)."""
        self._advance(now)
        if self._first is None:
            self._first = now
        self._cells[self._second % WINDOW] += count

    def per_second(self, now: float) -> float | None:
        """Slots freed a second, None while too few were seen to tell."""
        self._advance(now)
        total = sum(self._cells)
        if total < _ENOUGH or self._first is None:
            return None
        # The running second is only partly over: count the part that has passed.
        span = min(now - self._first, WINDOW - 1 + (now - int(now)))
        return total / max(span, 1.0)

    def _advance(self, now: float) -> None:
        second = int(now)
        if second <= self._second:
            return
        for each in range(max(self._second + 1, second - WINDOW + 1), second + 1):
            self._cells[each % WINDOW] = 0
        if second - self._second >= WINDOW:
            self._first = None
        self._second = second
