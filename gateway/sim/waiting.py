"""The order in which waiting sequences are served: first come first served, or by priority."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Finish(StrEnum):
    """Why a sequence ended, in vLLM's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate: sizes in tokens, `arrived` in seconds on any clock, lower `priority` first.

    `finish` is the reason reported with the last of its `output_tokens`.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    arrived: float = 0.0
    finish: Finish = Finish.LENGTH


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the engine: tokens whose KV is `computed`, tokens `generated`, `blocks` held."""

    request: Request
    order: int
    length: int
    computed: int = 0
    generated: int = 0
    blocks: int = 0
    preempted: bool = False

    @property
    def rank(self) -> tuple[int, float, int]:
        """Lower is served earlier under priority scheduling; ties are broken by arrival, then by entry."""
        return (self.request.priority, self.request.arrived, self.order)


class Line(Protocol):
    """Sequences that wait; `put_back` is for a preempted one, which goes as far forward as the rule allows."""

    def put(self, sequence: Sequence) -> None:
        """A new one."""
        ...

    def put_back(self, sequence: Sequence) -> None:
        """A preempted one."""
        ...

    def head(self) -> Sequence | None:
        """The next to be served."""
        ...

    def take(self, sequence: Sequence) -> None:
        """Remove one that waits, wherever it stands."""
        ...

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Sequence]: ...


class ArrivalLine:
    """First come, first served; a preempted sequence goes to the head."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[int, Sequence] = OrderedDict()

    def put(self, sequence: Sequence) -> None:
        """Append at the tail."""
        self._sequences[sequence.order] = sequence

    def put_back(self, sequence: Sequence) -> None:
        """Insert at the head."""
        self.put(sequence)
        self._sequences.move_to_end(sequence.order, last=False)

    def head(self) -> Sequence | None:
        """The next to be served."""
        return next(iter(self._sequences.values()), None)

    def take(self, sequence: Sequence) -> None:
        """Remove a sequence that waits, wherever it stands."""
        del self._sequences[sequence.order]

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())


class PriorityLine:
    """Lowest (priority, arrival) first; a preempted sequence goes back to its rank."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Sequence]] = []
        self._sequences: dict[int, Sequence] = {}

    def put(self, sequence: Sequence) -> None:
        """Insert at its rank."""
        self._sequences[sequence.order] = sequence
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def put_back(self, sequence: Sequence) -> None:
        """Insert at its rank: it is older than what came after it, so it needs no other favour."""
        self.put(sequence)

    def head(self) -> Sequence | None:
        """The next to be served."""
        # A sequence taken from the middle leaves its heap entry behind; entries are dropped when they surface.
        while self._heap and self._heap[0][1].order not in self._sequences:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def take(self, sequence: Sequence) -> None:
        """Remove a sequence that waits, wherever it stands."""
        del self._sequences[sequence.order]
        if self._heap[0][1] is sequence:
            heapq.heappop(self._heap)

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())
