"""What is measured: how long, how often, at which load, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

QUICK_PEERS = ("nginx", "vllm-router")
ALL_PEERS = ("nginx", "vllm-router", "smg", "sglang-router", "litellm", "portkey")


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. Each window lasts `seconds` after `warm_up`; figures are medians over `rounds`.

    Saturation: `connections` callers without a pause. Streams: `streams` at once of `rate` events a second each.
    Latency: `slow_rate` calls a second to the gateway and as many to its upstream, for `seconds` times `slow_share`.
    `back_to_back` streams without pacing, 0: left out. `settle`: s until all streams must flow, and until they end.
    """

    peers: tuple[str, ...]
    rounds: int = 3
    seconds: float = 3.0
    warm_up: float = 0.3
    connections: int = 64
    streams: int = 200
    rate: int = 100
    back_to_back: int = 32
    slow_rate: float = 100.0
    slow_share: float = 2.0
    settle: float = 0.5

    def __post_init__(self) -> None:
        if self.rounds < 1 or not 0 < self.seconds <= 60:
            raise ValueError("a window is longer than 0 and at most 60 s, and there is at least one round")


def full(peers: Sequence[str] = (), seconds: float = 3.0) -> Plan:
    """All peers, unless some are named."""
    return Plan(tuple(peers) or ALL_PEERS, seconds=seconds)


def quick(peers: Sequence[str] = (), seconds: float = 0.9) -> Plan:
    """Two peers and short windows: under a minute with what `full` takes several for."""
    return Plan(tuple(peers) or QUICK_PEERS, seconds=seconds, warm_up=0.2, back_to_back=0, slow_share=1.0, settle=0.3)


def turns(subjects: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """A B C A B C ...: what drifts on the machine hits all alike. Rounds count from 1."""
    return ((number, name) for number in range(1, rounds + 1) for name in subjects)


def chosen(text: str) -> tuple[str, ...]:
    """The peers of a list like `nginx,smg`. Raises ValueError for a name that is not known, or twice there."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if wrong := sorted(set(names) - set(ALL_PEERS)):
        raise ValueError(f"no such peer: {', '.join(wrong)} (there are {', '.join(ALL_PEERS)})")
    if len(set(names)) < len(names):
        raise ValueError(f"{text}: a peer is named twice")
    return names
