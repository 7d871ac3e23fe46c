"""A simulated pool under load: what was admitted is in time, the rest is told at once, batch gets its share."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, pairwise

import pytest

from gateway.core.admission import Admission, Admitted, QueueRules
from gateway.core.fairqueue import Ticket
from gateway.core.forecast import Forecast
from gateway.core.limit import Sample
from gateway.core.refusal import Reason, Refusal
from gateway.core.types import Band
from tests.core.making import SetLimit, a_ticket

PLACES = 16
HOLD = 1.0  # s a call keeps its slot on average
FIRST = 0.2  # s from dispatch to the first token
SLO = 2.0
CAPACITY = PLACES / HOLD  # calls a second
BATCH = 0.5  # s; how often new batch calls come to a line that never runs dry


@dataclass
class Told:
    """What became of one call; times in seconds since it came."""

    came: float
    band: Band
    cost: float
    wait: float | None = None
    refused: Refusal | None = None
    refused_after: float = 0.0


@dataclass
class Pool:
    """Discrete events round one Admission: arrivals, finished calls, deadlines."""

    admission: Admission
    dice: random.Random = field(default_factory=lambda: random.Random(1))
    told: dict[str, Told] = field(default_factory=dict)
    busy: list[tuple[float, int]] = field(default_factory=list)
    waiting: list[tuple[float, int]] = field(default_factory=list)
    _ends: list[tuple[float, str]] = field(default_factory=list)
    _serial: count[int] = field(default_factory=count)

    def arrive(self, now: float, band: Band, tenant: str) -> None:
        call_id = str(next(self._serial))
        cost = self.dice.uniform(200, 1800)
        self.told[call_id] = told = Told(now, band, cost)
        told.refused = self.admission.offer(Ticket(call_id, tenant, band, now, cost), now)
        self._poll(now)

    def events_until(self, until: float) -> None:
        while True:
            due = self.admission.next_deadline()
            now = min(self._ends[0][0] if self._ends else until, until if due is None else due)
            if now >= until:
                return
            if self._ends and self._ends[0][0] == now:
                _, call_id = heappop(self._ends)
                self.admission.finish(call_id, now, Sample(1, first_token=FIRST, cost=self.told[call_id].cost))
            self._poll(now)

    def _poll(self, now: float) -> None:
        for decided in self.admission.poll(now):
            told = self.told[decided.id]
            if isinstance(decided, Admitted):
                told.wait = decided.wait
                heappush(self._ends, (now + HOLD * self.dice.uniform(0.5, 1.5), decided.id))
            else:
                told.refused, told.refused_after = decided.refusal, now - told.came
        self.busy.append((now, self.admission.inflight))
        self.waiting.append((now, self.admission.waiting(Band.ONLINE)))

    def of(self, band: Band, since: float = 0.0, until: float = 1e9) -> list[Told]:
        return [each for each in self.told.values() if each.band is band and since <= each.came < until]


def simulated(
    load: Callable[[float], float], seconds: float, rules: QueueRules | None = None, *, batch: bool = False
) -> Pool:
    """A pool of 16 slots, `load(t)` times its capacity in online calls; with `batch` its batch line is never empty."""
    pool = Pool(Admission(SetLimit(PLACES, PLACES), rules or QueueRules()))
    dice = random.Random(2)
    comings: list[tuple[float, Band, str]] = []
    now = 0.0
    while now < seconds:
        now += dice.expovariate(CAPACITY * load(now))
        comings.append((now, Band.ONLINE, dice.choice(("ann", "bob", "cleo"))))
    if batch:
        rounds = int(seconds / BATCH)
        comings += [(turn * BATCH, Band.BATCH, "night") for turn in range(rounds) for _ in range(int(CAPACITY * BATCH))]
    for came, band, tenant in sorted(comings):
        pool.events_until(came)
        pool.arrive(came, band, tenant)
    pool.events_until(seconds + 3600.0)
    assert pool.admission.inflight == 0
    return pool


def tokens(calls: list[Told]) -> float:
    return sum(each.cost for each in calls if each.wait is not None)


def mean_busy(pool: Pool, since: float, until: float) -> float:
    seen = [(now, busy) for now, busy in pool.busy if since <= now < until]
    held = sum(busy * (later - now) for (now, busy), (later, _) in pairwise(seen))
    return held / (seen[-1][0] - seen[0][0])


def p95(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.95)]


def test_three_times_the_load() -> None:
    pool = simulated(lambda now: 3.0, 60.0)
    calls = pool.of(Band.ONLINE, since=5.0, until=55.0)
    admitted = [each for each in calls if each.wait is not None]
    refused = [each for each in calls if each.refused is not None]
    assert len(admitted) + len(refused) == len(calls)
    assert len(admitted) >= 0.95 * CAPACITY * 50
    in_time = sum(each.wait is not None and each.wait + FIRST <= SLO for each in admitted)
    assert in_time >= 0.99 * len(admitted)
    at_once = [each for each in refused if each.refused_after == 0.0]
    assert len(at_once) >= 0.99 * len(refused)
    reasons = Counter(each.refused.reason for each in at_once if each.refused is not None)
    assert set(reasons) <= {Reason.PAST_KNEE, Reason.DEADLINE_UNREACHABLE, Reason.FAIR_SHARE}
    assert mean_busy(pool, 5.0, 55.0) >= 0.98 * PLACES
    assert max(waiting for _, waiting in pool.waiting) <= 2 * PLACES


def test_a_line_that_is_too_long_for_the_deadline_is_refused_by_forecast() -> None:
    """W is far too large (100): the forecast refuses at once what the deadline would evict after a wait in vain."""
    pool = simulated(lambda now: 3.0, 60.0, QueueRules(online_limit=100))
    refused = [each for each in pool.of(Band.ONLINE, since=10.0, until=55.0) if each.refused is not None]
    reasons = Counter(each.refused.reason for each in refused if each.refused is not None)
    assert reasons[Reason.DEADLINE_UNREACHABLE] >= 0.85 * len(refused)
    assert mean_busy(pool, 5.0, 55.0) >= 0.98 * PLACES


def test_half_the_load_refuses_nobody_and_hardly_waits() -> None:
    pool = simulated(lambda now: 0.5, 60.0)
    calls = pool.of(Band.ONLINE)
    assert [each.refused for each in calls if each.refused is not None] == []
    assert p95([each.wait or 0.0 for each in calls]) < 0.1


@pytest.mark.parametrize("floor", [0.05, 0.2])
def test_batch_gets_about_its_floor_under_overload(floor: float) -> None:
    """QP-01: online at 3x capacity; batch gets its share of the tokens, no less and not much more."""
    pool = simulated(lambda now: 3.0, 120.0, QueueRules(floor=floor), batch=True)
    online, batch = pool.of(Band.ONLINE, 30.0), pool.of(Band.BATCH)
    served = [each for each in batch if each.wait is not None and 30.0 <= each.came + each.wait < 120.0]
    share = tokens(served) / (tokens(served) + tokens(online))
    assert 0.9 * floor <= share <= 1.15 * floor


def test_online_hardly_notices_batch() -> None:
    """QP-01: at 110 % of capacity, online callers wait at most a little longer than without batch."""
    alone = simulated(lambda now: 1.1, 120.0)
    beside = simulated(lambda now: 1.1, 120.0, QueueRules(floor=0.02), batch=True)
    waits = [p95([each.wait for each in pool.of(Band.ONLINE) if each.wait is not None]) for pool in (alone, beside)]
    assert waits[1] <= 1.1 * waits[0]


def test_without_a_floor_batch_gets_nothing_under_overload() -> None:
    pool = simulated(lambda now: 3.0, 60.0, QueueRules(floor=0.0), batch=True)
    served = [each for each in pool.of(Band.BATCH) if each.wait is not None and 5.0 <= each.came + each.wait < 55.0]
    assert served == []


def test_batch_fills_idle_slots_up_to_its_headroom() -> None:
    pool = simulated(lambda now: 0.5, 60.0, batch=True)
    assert mean_busy(pool, 5.0, 55.0) >= 0.7 * PLACES
    online = pool.of(Band.ONLINE)
    assert sum(each.refused is not None for each in online) <= 0.001 * len(online)
    assert p95([each.wait or 0.0 for each in online]) < 0.2


def test_recovery_after_a_burst_takes_less_than_two_seconds() -> None:
    pool = simulated(lambda now: 3.0 if 20.0 <= now < 40.0 else 0.5, 60.0)
    assert any(each.refused is not None for each in pool.of(Band.ONLINE, 25.0, 40.0))
    after = pool.of(Band.ONLINE, since=42.0)
    assert [each.refused for each in after if each.refused is not None] == []
    assert p95([each.wait or 0.0 for each in after]) < 0.1


def test_a_burst_after_a_quiet_time_may_use_the_whole_line() -> None:
    """A quiet pool frees few slots a second; that is no sign of how fast it drains a line once it is full."""
    pool = simulated(lambda now: 0.05, 60.0)
    for _ in range(2 * PLACES):
        pool.arrive(61.0, Band.ONLINE, "ann")
    burst = pool.of(Band.ONLINE, since=61.0)
    assert [each.refused for each in burst if each.refused is not None] == []
    pool.arrive(61.0, Band.ONLINE, "ann")
    last = pool.of(Band.ONLINE, since=61.0)[-1].refused
    assert last is not None and last.reason is Reason.PAST_KNEE


def test_an_engine_that_became_slow_is_noticed() -> None:
    """A forecast from the time when calls took 0.1 s gives way, once they take 4 s, within a few dozen calls."""
    forecast = Forecast()
    for serial in range(100):
        forecast.freed(1, 0.1, serial * 0.1)
    before = forecast.wait(16, 10.0, PLACES)
    for serial in range(60):
        forecast.freed(1, 4.0, 10.0 + serial * 0.25)
    after = forecast.wait(16, 25.0, PLACES)
    assert before is not None and after is not None
    assert before < 0.2
    assert 3.5 <= after <= 4.5


def test_nothing_is_forecast_before_anything_finished() -> None:
    forecast = Forecast()
    assert forecast.wait(8, 1.0, PLACES) is None
    assert forecast.wait(0, 1.0, PLACES) == 0.0
    assert forecast.retry_after(8, 1.0, PLACES) == 2.0


def test_retry_after_grows_with_the_backlog() -> None:
    admission = Admission(SetLimit(1, 0), QueueRules(batch_limit=0, floor=0.0))
    now = 0.0
    for serial in range(20):
        now += 2.0
        admission.offer(a_ticket(f"seen-{serial}"), now)
        admission.poll(now)
        admission.finish(f"seen-{serial}", now + 1.5)
    admission.offer(a_ticket("holder"), now + 2.0)
    admission.poll(now + 2.0)
    hints = []
    for slots in range(1, 40):
        refusal = admission.offer(a_ticket("next", slots=slots), now + 2.0)
        assert refusal is not None and refusal.retry_after is not None
        hints.append(refusal.retry_after)
    assert hints == sorted(hints)
    assert 1.4 <= hints[0] <= 1.6
    assert hints[-1] == 30.0
    assert len(set(hints)) > 10
