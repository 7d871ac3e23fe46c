"""Small makers of the things the core decides about, and a measure of what an object holds on to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from gateway.core.fairqueue import Ticket
from gateway.core.limit import Sample
from gateway.core.types import Band, Call, Prompt, Tenant

ACME = Tenant("acme")


def a_call(**given: object) -> Call:
    """A chat call of 100 prompt tokens and 50 output tokens; `given` replaces members of the Call."""
    members: dict[str, object] = {
        "id": "c1",
        "path": "/v1/chat/completions",
        "tenant": ACME,
        "model": "auto",
        "band": Band.ONLINE,
        "prompt": Prompt(tokens=100, text="hello"),
        "arrived": 0.0,
        "max_tokens": 50,
        "fields": {"model": b'"auto"', "messages": b"[]"},
    }
    return Call(**(members | given))  # type: ignore[arg-type]


def a_ticket(ticket_id: str, tenant: str = "acme", band: Band = Band.ONLINE, **given: float) -> Ticket:
    """A ticket of cost 100 and one slot; `given` replaces numbers of the Ticket."""
    slots = int(given.pop("slots", 1))
    return Ticket(ticket_id, tenant, band, **({"arrived": 0.0, "cost": 100.0} | given), slots=slots)


@dataclass
class SetLimit:
    """A limit that tests turn as they like; it remembers what it was taught."""

    value: int
    waiting: int
    samples: list[Sample] = field(default_factory=list)

    def sample(self, sample: Sample) -> None:
        """Remember it."""
        self.samples.append(sample)


def footprint(root: object) -> int:
    """Entries of all containers that `root` reaches: what it costs in memory, whatever it is built of."""
    seen: set[int] = set()
    total, todo = 0, [root]
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, type | str | bytes | int | float | None):
            continue
        seen.add(id(each))
        inside = list(_inside(each))
        total += len(each) if isinstance(each, dict | list | set | tuple) else 0
        todo.extend(inside)
    return total


def _inside(each: object) -> Iterator[object]:
    if isinstance(each, dict):
        return chain(each.keys(), each.values())
    if isinstance(each, list | set | tuple):
        return iter(each)
    slots = chain.from_iterable(getattr(kind, "__slots__", ()) for kind in type(each).__mro__)
    named = (getattr(each, name) for name in slots if hasattr(each, name))
    return chain(named, vars(each).values()) if hasattr(each, "__dict__") else named
