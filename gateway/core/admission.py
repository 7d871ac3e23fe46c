"""Who passes to the engines now, who waits, and who is shed: the heart of the gateway, without I/O or clock.

The base rule: at most N slots in flight, at most W online slots waiting (in line here plus in the engines), both
measured; past W, shed. Above it: online before batch but for a floor, batch only while there is headroom, tenants
fair by tokens within a band, and nobody waits for a first token that cannot come in time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from gateway.core.bands import Shares
from gateway.core.fairqueue import FairQueue, Ticket
from gateway.core.forecast import Forecast
from gateway.core.limit import Limit, Sample
from gateway.core.refusal import Reason, Refusal
from gateway.core.types import Band

_GUARD = 1.3  # slots come free unevenly: a forecast that only just fits would be late one time in three
_SHORTEST_WAIT = 0.05  # s; an impatient caller is at least offered the slot that comes free next


@dataclass(frozen=True, slots=True)
class QueueRules:
    """Bounds of a pool's lines. Times in seconds, counts in slots; `online_limit` None: the pool's waiting knee.

    `floor` is the share of tokens that batch gets while it waits; `headroom` the share of slots it leaves free;
    `first_token_slo` the longest an online caller should wait for a first token.
    """

    online_timeout: float = 2.0
    online_limit: int | None = None
    batch_timeout: float = 3600.0
    batch_limit: int = 10000
    floor: float = 0.02
    headroom: float = 0.25
    first_token_slo: float = 2.0


@dataclass(frozen=True, slots=True)
class Admitted:
    """The call may be sent to an engine; `wait` is how long it stood in line, s."""

    id: str
    wait: float


@dataclass(frozen=True, slots=True)
class Evicted:
    """The call had been queued and will not be served."""

    id: str
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class _Flight:
    ticket: Ticket
    since: float


class Admission:
    """One pool's admission; the caller owns time (`now`, s, monotonic) and I/O, and polls after every change."""

    def __init__(self, limit: Limit, rules: QueueRules) -> None:
        self.limit = limit
        self.rules = rules
        self.engine_waiting = 0  # slots the engines themselves report waiting, by their last scrape
        self._lines = {band: FairQueue() for band in Band}
        self._waiting: dict[str, Ticket] = {}
        self._flying: dict[str, _Flight] = {}
        self._flying_slots = dict.fromkeys(Band, 0)
        self._deadlines: list[tuple[float, str]] = []
        self._shares = Shares()
        self._forecast = Forecast()

    def in_flight(self, band: Band) -> int:
        """Slots of `band` that are with the engines."""
        return self._flying_slots[band]

    def waiting(self, band: Band) -> int:
        """Slots of `band` that stand in line here."""
        return self._lines[band].slots

    @property
    def inflight(self) -> int:
        """Slots of both bands that are with the engines."""
        return sum(self._flying_slots.values())

    @property
    def most_waiting(self) -> int:
        """W: online slots that may wait before calls are shed."""
        return self.limit.waiting if self.rules.online_limit is None else self.rules.online_limit

    @property
    def saturation(self) -> float:
        """1.0 = full (N slots in flight); above it as far as online calls wait, 2.0 at the waiting knee."""
        limit = self.limit.value
        if limit <= 0:
            return 2.0
        waiting = self._lines[Band.ONLINE].slots
        if not waiting:
            return min(1.0, self.inflight / limit)
        return 1.0 + min(1.0, waiting / max(1, self.most_waiting))

    @property
    def remembered(self) -> int:
        """Tenants the lines remember: bounded by those that wait or still owe."""
        return sum(line.tenants for line in self._lines.values())

    def forecast(self, now: float) -> float | None:
        """Expected time to a first token of an online call that came now, s; None while unknown."""
        wait = self._wait(self._lines[Band.ONLINE].slots, now)
        return None if wait is None else wait + self._forecast.first_token

    def offer(self, ticket: Ticket, now: float, patience: float | None = None) -> Refusal | None:
        """Take `ticket` in line, or refuse it; `poll` then says whether it passes.

        `patience` (s) is how long the caller waits for a first token at the most, None: as long as the rules allow.
        Raises ValueError if the id is here already.
        """
        if ticket.id in self._waiting or ticket.id in self._flying:
            raise ValueError(f"call {ticket.id} is already here")
        if self.limit.value <= 0:
            message = "No engine of this pool is available."
            return Refusal(Reason.NO_ENDPOINT, message, retry_after=self._retry_after(0, now))
        latest = now + self._longest_wait(ticket.band, patience)
        if not self._passes_at_once(ticket):
            refusal = self._past_knee(ticket, now) or self._unreachable(ticket, now, latest)
            if refusal is not None:
                return refusal
        self._enqueue(replace(ticket, latest=latest), front=False)
        return None

    def poll(self, now: float) -> list[Admitted | Evicted]:
        """Everything that is decided by now: first who ran out of time, then who passes, in order."""
        decided: list[Admitted | Evicted] = [*self._expired(now)]
        while (ticket := self._next()) is not None:
            self._lines[ticket.band].pop()
            del self._waiting[ticket.id]
            self._flying[ticket.id] = _Flight(ticket, now)
            self._flying_slots[ticket.band] += ticket.slots
            self._shares.spend(ticket.band, ticket.cost, now)
            decided.append(Admitted(ticket.id, now - ticket.arrived))
        return decided

    def finish(self, call_id: str, now: float, sample: Sample | None = None) -> None:
        """The call left its engine: its slots are free. Unknown ids are ignored; None: nothing learnt."""
        flight = self._land(call_id)
        if flight is None:
            return
        ticket = flight.ticket
        self._forecast.freed(ticket.slots, now - flight.since, now)
        if sample is None:
            return
        if sample.cost is not None:
            self._lines[ticket.band].settle(ticket.tenant, sample.cost - ticket.cost)
        if sample.first_token is not None and ticket.band is Band.ONLINE:
            self._forecast.seen(sample.first_token)
        self.limit.sample(sample)

    def requeue(self, call_id: str) -> None:
        """The engine turned the call away unserved: back to the head of its tenant's line, deadline unchanged."""
        flight = self._land(call_id)
        if flight is not None:
            ticket = flight.ticket
            self._lines[ticket.band].settle(ticket.tenant, -ticket.cost)
            self._enqueue(ticket, front=True)

    def cancel(self, call_id: str) -> None:
        """The caller left while waiting. Unknown ids are ignored; a call in flight is finished, not cancelled."""
        ticket = self._waiting.pop(call_id, None)
        if ticket is not None:
            self._lines[ticket.band].remove(call_id)

    def evict_all(self, refusal: Refusal) -> list[Evicted]:
        """Everybody out of line with `refusal` (drain); calls in flight stay."""
        waiting = list(self._waiting)
        for call_id in waiting:
            self.cancel(call_id)
        return [Evicted(call_id, refusal) for call_id in waiting]

    def next_deadline(self) -> float | None:
        """When `poll` is due at the latest even if nothing else happens, s; None: never."""
        while self._deadlines and self._stale(self._deadlines[0]):
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _land(self, call_id: str) -> _Flight | None:
        flight = self._flying.pop(call_id, None)
        if flight is not None:
            self._flying_slots[flight.ticket.band] -= flight.ticket.slots
        return flight

    def _enqueue(self, ticket: Ticket, *, front: bool) -> None:
        self._waiting[ticket.id] = ticket
        self._lines[ticket.band].push(ticket, front=front)
        if ticket.latest is not None:
            heappush(self._deadlines, (ticket.latest, ticket.id))
        if len(self._deadlines) > 64 + 2 * len(self._waiting):
            self._deadlines = [each for each in self._deadlines if not self._stale(each)]
            heapify(self._deadlines)

    def _stale(self, item: tuple[float, str]) -> bool:
        ticket = self._waiting.get(item[1])
        return ticket is None or ticket.latest != item[0]

    def _expired(self, now: float) -> list[Evicted]:
        evicted: list[Evicted] = []
        while (due := self.next_deadline()) is not None and due <= now:
            ticket = self._waiting[self._deadlines[0][1]]
            self.cancel(ticket.id)
            message = f"No engine came free within {now - ticket.arrived:.1f} s."
            retry = self._retry_after(self._lines[ticket.band].slots, now)
            evicted.append(Evicted(ticket.id, Refusal(Reason.QUEUE_TIMEOUT, message, retry_after=retry)))
        return evicted

    def _next(self) -> Ticket | None:
        """Who passes now: online first, but batch if it got less than its floor, or if there is headroom for it."""
        online, batch = self._lines[Band.ONLINE].peek(), self._lines[Band.BATCH].peek()
        if batch is not None and self._shares.below(Band.BATCH, self.rules.floor):
            return batch if self._fits(batch, headroom=0.0) else None
        if online is not None:
            return online if self._fits(online, headroom=0.0) else None
        return batch if batch is not None and self._fits(batch, self.rules.headroom) else None

    def _fits(self, ticket: Ticket, headroom: float) -> bool:
        """Whether its slots are free; a call with more slots than there are passes when it is alone."""
        limit = self.limit.value
        bound = max(1, int(limit * (1.0 - headroom))) if limit > 0 else 0
        return self.inflight + ticket.slots <= bound or (self.inflight == 0 and bound > 0)

    def _passes_at_once(self, ticket: Ticket) -> bool:
        online, batch = self._lines[Band.ONLINE], self._lines[Band.BATCH]
        # Behind others of its band even a small call must wait: the head may need more slots than are free.
        if online or self._lines[ticket.band] or (batch and self._shares.below(Band.BATCH, self.rules.floor)):
            return False
        return self._fits(ticket, self.rules.headroom if ticket.band is Band.BATCH else 0.0)

    def _past_knee(self, ticket: Ticket, now: float) -> Refusal | None:
        """The line is full. A tenant below its share of it may still enter, up to twice the knee."""
        line = self._lines[ticket.band]
        retry = self._retry_after(line.slots + ticket.slots, now)
        if ticket.band is Band.BATCH:
            if line.slots + ticket.slots <= self.rules.batch_limit:
                return None
            return Refusal(Reason.PAST_KNEE, f"The batch line is full ({line.slots} wait).", retry_after=retry)
        most, waiting = self.most_waiting, line.slots + self.engine_waiting
        if waiting + ticket.slots <= most:
            return None
        own, rivals = line.slots_of(ticket.tenant), line.rivals(ticket.tenant)
        share = most * ticket.weight / (ticket.weight + rivals)
        if rivals and own + ticket.slots <= share and line.slots + ticket.slots <= 2 * most:
            return None
        if rivals and own > share:
            message = f"{own} of your calls wait already, your fair share of the line is {share:.0f} of {most}."
            return Refusal(Reason.FAIR_SHARE, message, retry_after=retry)
        message = f"The pool is full and {waiting} calls wait; the waiting knee is {most}."
        return Refusal(Reason.PAST_KNEE, message, retry_after=retry)

    def _unreachable(self, ticket: Ticket, now: float, latest: float) -> Refusal | None:
        """By forecast its turn comes too late: said at once, instead of after the wait. Batch has no such test."""
        if ticket.band is Band.BATCH:
            return None
        line = self._lines[Band.ONLINE]
        own = line.slots_of(ticket.tenant) * (ticket.weight + line.rivals(ticket.tenant)) / ticket.weight
        wait = self._wait(min(line.slots, own) + ticket.slots, now)
        if wait is None or now + wait * _GUARD <= latest:
            return None
        first, retry = wait + self._forecast.first_token, self._retry_after(line.slots, now)
        message = f"A first token is expected only in {first:.1f} s; that is later than was asked for."
        return Refusal(Reason.DEADLINE_UNREACHABLE, message, retry_after=retry)

    def _wait(self, slots: float, now: float) -> float | None:
        return self._forecast.wait(slots, now, self.limit.value)

    def _retry_after(self, slots: float, now: float) -> float:
        return self._forecast.retry_after(slots, now, self.limit.value)

    def _longest_wait(self, band: Band, patience: float | None) -> float:
        """Seconds in line after which the call is given up: what is left when the engine's own time is taken off."""
        if band is Band.BATCH:
            return self.rules.batch_timeout if patience is None else min(patience, self.rules.batch_timeout)
        if patience is None:
            in_time = self.rules.first_token_slo - self._forecast.first_token
            return min(self.rules.online_timeout, in_time) if in_time > 0 else self.rules.online_timeout
        return max(patience - self._forecast.first_token, min(patience, _SHORTEST_WAIT))
