"""Which endpoint takes the next call."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.picker import Candidate, pick
from gateway.core.types import Endpoint, EndpointLoad


def candidate(
    name: str, in_flight: int, weight: float = 1.0, limit: int | None = None, waiting: float | None = None
) -> Candidate:
    load = None if waiting is None else EndpointLoad(at=0.0, waiting=waiting)
    return Candidate(Endpoint(name, f"http://{name}", weight), in_flight, limit, load)


def name(
    candidates: list[Candidate], dice: float = 0.0, avoid: frozenset[str] = frozenset(), over: bool = False
) -> str | None:
    chosen = pick(candidates, dice, avoid, over=over)
    return None if chosen is None else chosen.name


def test_the_least_busy_for_its_weight() -> None:
    assert name([candidate("a", 3), candidate("b", 2), candidate("c", 4)]) == "b"
    assert name([candidate("a", 3), candidate("b", 5, weight=2.0)]) == "b"


@pytest.mark.parametrize(("dice", "expected"), [(0.0, "a"), (0.49, "a"), (0.5, "b"), (0.999, "b"), (1.0, "b")])
def test_dice_part_equals(dice: float, expected: str) -> None:
    assert name([candidate("a", 1), candidate("b", 1), candidate("c", 2)], dice) == expected


def test_scraped_waiting_parts_equals_but_never_outweighs_the_own_count() -> None:
    assert name([candidate("a", 1, waiting=5), candidate("b", 1, waiting=0)]) == "b"
    assert name([candidate("a", 1, waiting=500), candidate("b", 2, waiting=0)]) == "a"


def test_full_endpoints_only_when_asked_for() -> None:
    full = [candidate("a", 2, limit=2), candidate("b", 3, limit=2)]
    assert name(full) is None
    assert name(full, over=True) == "a"
    assert name([*full, candidate("c", 8, limit=9)], over=True) == "c"


def test_tried_and_weightless_endpoints_are_out() -> None:
    assert name([candidate("a", 0), candidate("b", 9)], avoid=frozenset("a")) == "b"
    assert name([candidate("a", 0)], avoid=frozenset("a"), over=True) is None
    assert name([candidate("a", 0, weight=0.0)]) is None
    assert name([]) is None


@given(st.lists(st.floats(0, 0.999), min_size=60, max_size=60))
def test_load_follows_weight(dice: list[float]) -> None:
    """Picks one after another end within one call of the exact share."""
    held: Counter[str] = Counter()
    for roll in dice:
        chosen = name([candidate("a", held["a"]), candidate("b", held["b"], weight=2.0)], roll)
        assert chosen is not None
        held[chosen] += 1
    assert abs(held["a"] - 20) <= 1
