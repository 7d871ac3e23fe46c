"""What a simulated engine tells tests and demos about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request as it arrived: `at` is wall clock, seconds; header names in lower case; at most 64 KiB of body."""

    at: float
    method: str
    path: str
    headers: Mapping[str, str]
    body: str


@dataclass(frozen=True, slots=True)
class SimState:
    """A moment of a simulated engine.

    `running` and `waiting` are the engine's sequences as of the end of the step under way, `in_flight` those not yet
    answered; `kv` is 0 to 1; `preemptions`, `aborted` (sequences), `finished` (sequences) and `step` count since the
    start; `requests` are the last 50 POSTs, oldest first.
    """

    running: int
    waiting: int
    in_flight: int
    kv: float
    used_blocks: int
    preemptions: int
    aborted: int
    finished: int
    step: int
    connections: int
    requests: tuple[SeenRequest, ...]
