"""The number a pool may have in flight; who may pass is Admission's business."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Sample:
    """What one finished call taught: calls in flight when it left, seconds, tokens it cost (prompt + 2 x output).

    `dropped` marks a call that the engine refused or failed.
    """

    inflight: int
    first_token: float | None = None
    inter_token: float | None = None
    cost: float | None = None
    dropped: bool = False


class Limit(Protocol):
    """A number that may learn from samples."""

    @property
    def value(self) -> int:
        """Slots that may be in flight now."""

    @property
    def waiting(self) -> int:
        """The waiting knee: slots that may wait (in line here plus in the engines) before calls are shed."""

    def sample(self, sample: Sample) -> None:
        """Learn from a finished call."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The measured knee of one endpoint: N in flight and W waiting, in sequences."""

    in_flight: int
    waiting: int


class KneeLimit:
    """The base rule (N, W): the measured knee of one endpoint times the endpoints that are available."""

    def __init__(self, capacity: Capacity, available: Callable[[], float]) -> None:
        self._capacity = capacity
        self._available = available

    @property
    def value(self) -> int:
        """N of all available endpoints."""
        return int(self._capacity.in_flight * self._available())

    @property
    def waiting(self) -> int:
        """W of all available endpoints."""
        return int(self._capacity.waiting * self._available())

    def sample(self, sample: Sample) -> None:
        """The measured knee does not learn."""
