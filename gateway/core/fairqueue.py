"""One band's waiting line: fair between tenants by tokens served and weight, first come first served within one.

A virtual token counter (VTC, Sheng et al., OSDI 2024): each tenant's counter grows by what it was served, divided by
its weight; the tenant with the least counter goes next. A tenant that comes back is lifted to the line's virtual
time, so that idleness saves nothing up. Every operation is O(log n); an idle tenant leaves nothing behind once the
virtual time has passed its counter.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from gateway.core.types import Band


@dataclass(frozen=True, slots=True)
class Ticket:
    """A call's place in line: `slots` sequences on the engine, `cost` in tokens (prompt + 2 x expected output).

    `latest` is the clock time (s) after which it must not be dispatched any more, None: it waits for ever.
    """

    id: str
    tenant: str
    band: Band
    arrived: float
    cost: float = 1.0
    weight: float = 1.0
    slots: int = 1
    latest: float | None = None


class _Flow:
    """One tenant in the line."""

    __slots__ = ("counter", "entry", "name", "slots", "waiting", "weight")

    def __init__(self, name: str, counter: float) -> None:
        self.name = name
        self.counter = counter
        self.weight = 1.0
        self.waiting: OrderedDict[str, Ticket] = OrderedDict()
        self.slots = 0
        self.entry = 0  # number of its one valid heap entry


class FairQueue:
    """Tickets of one band; lengths are in slots (sequences the engine will run)."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] = {}
        self._tickets: dict[str, _Flow] = {}
        self._active: list[tuple[float, int, str]] = []
        self._idle: list[tuple[float, str]] = []
        self._entries = 0
        self._virtual = 0.0
        self._weights = 0.0
        self.slots = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, ticket_id: str) -> bool:
        return ticket_id in self._tickets

    @property
    def tenants(self) -> int:
        """Tenants that are remembered, waiting or not: what the line costs in memory."""
        return len(self._flows)

    def slots_of(self, tenant: str) -> int:
        """Slots that `tenant` waits for."""
        flow = self._flows.get(tenant)
        return flow.slots if flow else 0

    def rivals(self, tenant: str) -> float:
        """Weights of the other tenants that wait, summed."""
        flow = self._flows.get(tenant)
        return max(0.0, self._weights - (flow.weight if flow and flow.waiting else 0.0))

    def push(self, ticket: Ticket, *, front: bool = False) -> None:
        """Put `ticket` at the end of its tenant's line, or at its head if it had been dispatched in vain."""
        flow = self._flows.get(ticket.tenant)
        if flow is None:
            flow = self._flows[ticket.tenant] = _Flow(ticket.tenant, self._virtual)
        if flow.waiting:
            self._weights += ticket.weight - flow.weight
            flow.weight = ticket.weight
        else:
            self._weights += ticket.weight
            flow.weight = ticket.weight
            flow.counter = max(flow.counter, self._virtual)
        if front or not flow.waiting:
            self._enter(flow, first=front)
        flow.waiting[ticket.id] = ticket
        if front:
            flow.waiting.move_to_end(ticket.id, last=False)
        flow.slots += ticket.slots
        self.slots += ticket.slots
        self._tickets[ticket.id] = flow

    def peek(self) -> Ticket | None:
        """The ticket that goes next, left in line."""
        flow = self._next()
        return next(iter(flow.waiting.values())) if flow else None

    def pop(self) -> Ticket | None:
        """The ticket that goes next, taken out and charged to its tenant."""
        flow = self._next()
        if flow is None:
            return None
        ticket = next(iter(flow.waiting.values()))
        self._virtual = max(self._virtual, flow.counter)
        flow.counter += ticket.cost / flow.weight
        self._take(ticket.id, flow)
        if flow.waiting:
            self._enter(flow)
        if not self._tickets:
            # The line is empty: nobody was passed over, so nobody carries a debt from it but who is ahead of this one.
            self._virtual = max(self._virtual, flow.counter)
        self._forget_idle()
        return ticket

    def remove(self, ticket_id: str) -> Ticket | None:
        """Take a ticket out without charging its tenant; None if it is not in line."""
        flow = self._tickets.get(ticket_id)
        if flow is None:
            return None
        ticket = self._take(ticket_id, flow)
        self._forget_idle()
        return ticket

    def settle(self, tenant: str, cost: float) -> None:
        """Charge `cost` more (or, negative, less) than was expected when the tenant's ticket left."""
        flow = self._flows.get(tenant)
        if flow is None:
            return
        flow.counter += cost / flow.weight
        if flow.waiting:
            self._enter(flow)
        else:
            self._rest(flow)
            self._forget_idle()

    def _next(self) -> _Flow | None:
        while self._active:
            _, entry, name = self._active[0]
            flow = self._flows.get(name)
            if flow is not None and flow.waiting and flow.entry == entry:
                return flow
            heappop(self._active)
        return None

    def _enter(self, flow: _Flow, *, first: bool = False) -> None:
        self._entries += 1
        flow.entry = -self._entries if first else self._entries  # among equals, who was dispatched in vain goes first
        heappush(self._active, (flow.counter, flow.entry, flow.name))
        if len(self._active) > 64 + 2 * len(self._flows):
            self._active = [each for each in self._active if self._valid(each)]
            heapify(self._active)

    def _valid(self, item: tuple[float, int, str]) -> bool:
        flow = self._flows.get(item[2])
        return flow is not None and bool(flow.waiting) and flow.entry == item[1]

    def _take(self, ticket_id: str, flow: _Flow) -> Ticket:
        ticket = flow.waiting.pop(ticket_id)
        del self._tickets[ticket_id]
        flow.slots -= ticket.slots
        self.slots -= ticket.slots
        if not flow.waiting:
            self._weights = self._weights - flow.weight if self._tickets else 0.0
            self._rest(flow)
        return ticket

    def _rest(self, flow: _Flow) -> None:
        heappush(self._idle, (flow.counter, flow.name))
        if len(self._idle) > 64 + 2 * len(self._flows):
            resting = {each.name: each.counter for each in self._flows.values() if not each.waiting}
            self._idle = [(counter, name) for name, counter in resting.items()]
            heapify(self._idle)

    def _forget_idle(self) -> None:
        """Drop tenants that wait for nothing and owe nothing: coming back, they would start here anyway."""
        while self._idle and self._idle[0][0] <= self._virtual:
            _, name = heappop(self._idle)
            flow = self._flows.get(name)
            if flow is not None and not flow.waiting:
                if flow.counter <= self._virtual:
                    del self._flows[name]
                else:
                    heappush(self._idle, (flow.counter, name))
