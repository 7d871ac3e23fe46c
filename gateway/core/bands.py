"""What each band was served lately, so that batch keeps its floor under steady online load."""

from __future__ import annotations

import math

from gateway.core.types import Band

DECAY = 60.0


class Shares:
    """Tokens spent by band, forgotten with a time constant of `DECAY` seconds."""

    __slots__ = ("_at", "_spent")

    def __init__(self) -> None:
        self._spent = dict.fromkeys(Band, 0.0)
        self._at = 0.0

    def spend(self, band: Band, cost: float, now: float) -> None:
        """`cost` tokens of `band` were sent to the engines at `now` (s)."""
        fading = math.exp(-max(0.0, now - self._at) / DECAY)
        for each in Band:
            self._spent[each] *= fading
        self._spent[band] += cost
        self._at = max(self._at, now)

    def below(self, band: Band, floor: float) -> bool:
        """Whether `band` got less than the share `floor` (0..1) of what was spent."""
        return self._spent[band] < floor * sum(self._spent.values())
