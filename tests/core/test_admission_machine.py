"""Whatever happens in whatever order: nobody is lost, nobody passes who may not, and nothing stays behind."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.core.admission import Admission, Admitted, Evicted, QueueRules
from gateway.core.fairqueue import Ticket
from gateway.core.limit import Sample
from gateway.core.refusal import Reason, Refusal
from gateway.core.types import Band
from tests.core.making import SetLimit, footprint

LONGEST_FIRST_TOKEN = 0.5
EPSILON = 1e-9
# Lines are lists with lazily dropped entries: 64 per heap are tolerated before they are swept.
TOLERATED = 600

tenants = st.sampled_from(["ann", "bob", "cleo"])
costs = st.floats(1.0, 5000.0)


@dataclass
class Known:
    """What the test knows of a call; deadlines are the earliest and latest that the rules allow, s."""

    ticket: Ticket
    earliest: float
    latest: float


class AdmissionMachine(RuleBasedStateMachine):
    """Drives one Admission next to a plain model of who waits and who flies."""

    @initialize(
        value=st.integers(1, 6),
        waiting=st.integers(0, 6),
        online_limit=st.none() | st.integers(0, 6),
        batch_limit=st.integers(0, 8),
        floor=st.sampled_from([0.0, 0.1, 0.4]),
        headroom=st.sampled_from([0.0, 0.25, 0.9]),
    )
    def begin(
        self, value: int, waiting: int, online_limit: int | None, batch_limit: int, floor: float, headroom: float
    ) -> None:
        self.limit = SetLimit(value, waiting)
        self.bounds = QueueRules(
            batch_timeout=20.0, online_limit=online_limit, batch_limit=batch_limit, floor=floor, headroom=headroom
        )
        self.admission = Admission(self.limit, self.bounds)
        self.now = 1000.0
        self.serial = 0
        self.waiting: dict[str, Known] = {}
        self.flying: dict[str, Known] = {}
        self.order: dict[tuple[Band, str], list[str]] = {}
        self.spent = dict.fromkeys(Band, 0.0)
        self.spent_at = self.now
        self.taught = 0

    # what callers, engines and operators do

    @rule(
        tenant=tenants,
        band=st.sampled_from(Band),
        slots=st.integers(1, 3),
        cost=costs,
        weight=st.sampled_from([0.5, 1.0, 2.0]),
        patience=st.none() | st.floats(0.01, 30.0),
    )
    def offer(self, tenant: str, band: Band, slots: int, cost: float, weight: float, patience: float | None) -> None:
        self.serial += 1
        ticket = Ticket(str(self.serial), tenant, band, self.now, cost, weight, slots)
        before = self.slots(self.waiting, band)
        rivals = any(each.ticket.tenant != tenant for each in self.waiting.values() if each.ticket.band is band)
        free = not self.waiting and self.fits(slots, self.bound(band))
        most, engine = self.admission.most_waiting, self.admission.engine_waiting
        refusal = self.admission.offer(ticket, self.now, patience)
        if refusal is not None:
            self.check_refusal(refusal, ticket, free)
            return
        assert self.limit.value > 0
        earliest, latest = self.deadlines(band, patience)
        self.waiting[ticket.id] = Known(ticket, self.now + earliest, self.now + latest)
        self.line(ticket).append(ticket.id)
        self.poll()
        if free:
            assert ticket.id in self.flying or earliest <= 0
        if ticket.id in self.waiting and band is Band.BATCH:
            assert before + slots <= self.bounds.batch_limit
        elif ticket.id in self.waiting:
            assert before + engine + slots <= most or (rivals and before + slots <= 2 * most)

    @rule(seconds=st.floats(0.0, 3.0))
    def advance(self, seconds: float) -> None:
        due = self.admission.next_deadline()
        self.now += seconds
        evicted = self.poll()
        assert bool(evicted) == (due is not None and due <= self.now)

    @precondition(lambda self: self.waiting)
    @rule()
    def advance_to_the_deadline(self) -> None:
        due = self.admission.next_deadline()
        assert due is not None and due > self.now
        self.now = due
        assert self.poll()

    @precondition(lambda self: self.flying)
    @rule(
        data=st.data(),
        sample=st.none()
        | st.builds(
            Sample,
            inflight=st.just(1),
            first_token=st.none() | st.floats(0.0, LONGEST_FIRST_TOKEN),
            cost=st.none() | costs,
        ),
    )
    def finish(self, data: st.DataObject, sample: Sample | None) -> None:
        call_id = data.draw(st.sampled_from(sorted(self.flying)))
        self.admission.finish(call_id, self.now, sample)
        self.taught += sample is not None
        del self.flying[call_id]
        self.poll()
        self.admission.finish(call_id, self.now, sample)
        self.admission.cancel(call_id)
        assert len(self.limit.samples) == self.taught

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        call_id = data.draw(st.sampled_from(sorted(self.waiting)))
        self.admission.cancel(call_id)
        self.forget(call_id)
        self.poll()
        self.admission.cancel(call_id)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        call_id = data.draw(st.sampled_from(sorted(self.flying)))
        self.admission.requeue(call_id)
        known = self.waiting[call_id] = self.flying.pop(call_id)
        self.line(known.ticket).insert(0, call_id)
        self.poll()

    @rule(value=st.integers(0, 6))
    def change_the_limit(self, value: int) -> None:
        self.limit.value = value
        self.poll()

    @rule(waiting=st.integers(0, 5))
    def engines_report(self, waiting: int) -> None:
        self.admission.engine_waiting = waiting
        self.poll()

    @rule()
    def evict_all(self) -> None:
        refusal = Refusal(Reason.DRAINING, "over")
        evicted = self.admission.evict_all(refusal)
        assert {each.id for each in evicted} == set(self.waiting)
        assert all(each.refusal is refusal for each in evicted)
        self.waiting.clear()
        self.order.clear()
        assert self.poll() == []

    # what must hold

    @invariant()
    def counters_tell_the_truth(self) -> None:
        for band in Band:
            assert self.admission.waiting(band) == self.slots(self.waiting, band)
            assert self.admission.in_flight(band) == self.slots(self.flying, band)
        assert self.admission.inflight == sum(each.ticket.slots for each in self.flying.values())
        due = self.admission.next_deadline()
        assert (due is None) == (not self.waiting)
        if due is not None:
            assert min(each.earliest for each in self.waiting.values()) - EPSILON <= due
            assert min(each.latest for each in self.waiting.values()) + EPSILON >= due
        assert 0.0 <= self.admission.saturation <= 2.0

    @invariant()
    def no_slot_is_idle_while_a_call_waits(self) -> None:
        online, batch = self.heads(Band.ONLINE), self.heads(Band.BATCH)
        if batch and self.below_floor(-EPSILON):
            assert any(not self.fits(each, self.limit.value) for each in batch)
        elif online and not (batch and self.below_floor(EPSILON)):
            assert any(not self.fits(each, self.limit.value) for each in online)
        elif batch and not online:
            assert any(not self.fits(each, self.bound(Band.BATCH)) for each in batch)

    def teardown(self) -> None:
        if not hasattr(self, "admission"):
            return
        self.limit.value = max(1, self.limit.value)
        while self.flying or self.waiting:
            for call_id in list(self.flying):
                self.admission.finish(call_id, self.now)
                del self.flying[call_id]
            self.poll()
            assert self.flying or not self.waiting
        assert self.admission.inflight == 0
        assert [self.admission.waiting(band) for band in Band] == [0, 0]
        assert self.admission.next_deadline() is None
        assert self.admission.saturation == 0.0
        assert self.admission.remembered <= 8
        assert footprint(self.admission) - footprint(self.limit) < TOLERATED

    # the model

    def poll(self) -> list[str]:
        evicted = []
        for decided in self.admission.poll(self.now):
            if isinstance(decided, Evicted):
                known = self.forget(decided.id)
                assert known.earliest <= self.now + EPSILON
                assert decided.refusal.reason is Reason.QUEUE_TIMEOUT
                evicted.append(decided.id)
            else:
                self.check_admitted(decided)
        return evicted

    def check_admitted(self, decided: Admitted) -> None:
        known = self.waiting[decided.id]
        ticket = known.ticket
        assert self.now < known.latest
        assert self.line(ticket)[0] == ticket.id
        assert decided.wait == self.now - ticket.arrived
        assert self.fits(ticket.slots, self.limit.value)
        others = any(each.ticket.band is not ticket.band for each in self.waiting.values())
        if ticket.band is Band.BATCH:
            headroom_left = not others and self.fits(ticket.slots, self.bound(Band.BATCH))
            assert headroom_left or self.below_floor(EPSILON)
        elif others:
            assert not self.below_floor(-EPSILON)
        self.forget(ticket.id)
        self.flying[ticket.id] = known
        fading = math.exp(-(self.now - self.spent_at) / 60.0)
        self.spent = {band: spent * fading for band, spent in self.spent.items()}
        self.spent_at = self.now
        self.spent[ticket.band] += ticket.cost

    def check_refusal(self, refusal: Refusal, ticket: Ticket, free: bool) -> None:
        reason = refusal.reason
        assert (reason is Reason.NO_ENDPOINT) == (self.limit.value <= 0)
        if reason is Reason.NO_ENDPOINT:
            return
        assert not free
        assert refusal.retry_after is not None and 1.0 <= refusal.retry_after <= 30.0
        line, engine = self.slots(self.waiting, ticket.band), self.admission.engine_waiting
        if ticket.band is Band.BATCH:
            assert reason is Reason.PAST_KNEE and line + ticket.slots > self.bounds.batch_limit
        elif reason is not Reason.DEADLINE_UNREACHABLE:
            assert reason in (Reason.PAST_KNEE, Reason.FAIR_SHARE)
            assert line + engine + ticket.slots > self.admission.most_waiting

    def deadlines(self, band: Band, patience: float | None) -> tuple[float, float]:
        if band is Band.BATCH:
            wait = self.bounds.batch_timeout if patience is None else min(patience, self.bounds.batch_timeout)
            return wait, wait
        if patience is None:
            return self.bounds.first_token_slo - LONGEST_FIRST_TOKEN, self.bounds.online_timeout
        return max(patience - LONGEST_FIRST_TOKEN, min(patience, 0.05)), patience

    def forget(self, call_id: str) -> Known:
        known = self.waiting.pop(call_id)
        self.line(known.ticket).remove(call_id)
        return known

    def line(self, ticket: Ticket) -> list[str]:
        return self.order.setdefault((ticket.band, ticket.tenant), [])

    def heads(self, band: Band) -> list[int]:
        return [self.waiting[ids[0]].ticket.slots for (each, _), ids in self.order.items() if each is band and ids]

    def slots(self, calls: dict[str, Known], band: Band) -> int:
        return sum(each.ticket.slots for each in calls.values() if each.ticket.band is band)

    def bound(self, band: Band) -> int:
        value = self.limit.value
        return max(1, int(value * (1.0 - self.bounds.headroom))) if band is Band.BATCH and value else value

    def fits(self, slots: int, bound: int) -> bool:
        flying = sum(each.ticket.slots for each in self.flying.values())
        return bound > 0 and (flying + slots <= bound or flying == 0)

    def below_floor(self, slack: float) -> bool:
        return self.spent[Band.BATCH] < self.bounds.floor * sum(self.spent.values()) + slack


AdmissionMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAdmission = AdmissionMachine.TestCase
