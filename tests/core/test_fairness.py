"""Tenants that wait get tokens by weight, whatever they send, and leave nothing behind when they go."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.admission import Admission, Admitted, QueueRules
from gateway.core.fairqueue import FairQueue
from gateway.core.limit import Sample
from gateway.core.refusal import Reason
from gateway.core.types import Band
from tests.core.making import SetLimit, a_ticket, footprint

costs = st.floats(1.0, 4000.0)


def fill(queue: FairQueue, tenant: str, count: int, cost: float = 100.0, weight: float = 1.0) -> None:
    first = queue.slots
    for serial in range(first, first + count):
        queue.push(a_ticket(f"{tenant}-{serial}", tenant, cost=cost, weight=weight))


def served(queue: FairQueue, count: int) -> Counter[str]:
    """Tokens by tenant of the next `count` tickets."""
    tokens: Counter[str] = Counter()
    for _ in range(count):
        ticket = queue.pop()
        assert ticket is not None
        tokens[ticket.tenant] += int(ticket.cost)
    return tokens


@given(
    first=st.lists(costs, min_size=40, max_size=40),
    second=st.lists(costs, min_size=40, max_size=40),
    weights=st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([0.5, 1.0, 3.0])),
)
def test_two_tenants_that_wait_never_drift_apart(
    first: list[float], second: list[float], weights: tuple[float, float]
) -> None:
    """The bound of the virtual token counter: over any time, two calls of the largest cost by weight."""
    queue = FairQueue()
    for name, asked, weight in (("ann", first, weights[0]), ("bob", second, weights[1])):
        for serial, cost in enumerate(asked):
            queue.push(a_ticket(f"{name}-{serial}", name, cost=cost, weight=weight))
    lead, leads = 0.0, [0.0]
    while queue.slots_of("ann") and queue.slots_of("bob"):
        ticket = queue.pop()
        assert ticket is not None
        lead += ticket.cost / ticket.weight * (1 if ticket.tenant == "ann" else -1)
        leads.append(lead)
    largest = max(max(first) / weights[0], max(second) / weights[1])
    assert max(leads) - min(leads) <= 2 * largest * (1 + 1e-9)


@given(asked=st.lists(st.tuples(st.sampled_from("abcd"), costs, st.booleans()), min_size=1, max_size=60))
def test_first_come_first_served_within_a_tenant(asked: list[tuple[str, float, bool]]) -> None:
    queue = FairQueue()
    expected: dict[str, list[str]] = {}
    for serial, (tenant, cost, front) in enumerate(asked):
        queue.push(a_ticket(str(serial), tenant, cost=cost), front=front)
        expected.setdefault(tenant, []).insert(0 if front else len(expected[tenant]), str(serial))
    gone: dict[str, list[str]] = {}
    while (ticket := queue.pop()) is not None:
        gone.setdefault(ticket.tenant, []).append(ticket.id)
    assert gone == expected
    assert (len(queue), queue.slots) == (0, 0)


def test_weights_are_respected() -> None:
    queue = FairQueue()
    fill(queue, "double", 300, weight=2.0)
    fill(queue, "single", 300, weight=1.0)
    tokens = served(queue, 300)
    assert 1.8 <= tokens["double"] / tokens["single"] <= 2.2


def test_tokens_are_shared_and_not_calls() -> None:
    queue = FairQueue()
    fill(queue, "long", 100, cost=1000.0)
    fill(queue, "short", 1000, cost=100.0)
    tokens = served(queue, 550)
    assert 0.9 <= tokens["long"] / tokens["short"] <= 1.1


def test_a_flood_does_not_make_a_light_tenant_wait() -> None:
    for flood in (10, 2000):
        queue = FairQueue()
        fill(queue, "flood", flood)
        for turn in range(4):
            queue.push(a_ticket(f"light-{turn}", "light"))
            assert any(ticket is not None and ticket.tenant == "light" for ticket in (queue.pop(), queue.pop()))


def test_an_idle_tenant_saves_nothing_up() -> None:
    queue = FairQueue()
    fill(queue, "idle", 1)
    fill(queue, "busy", 400)
    served(queue, 200)
    fill(queue, "idle", 100)
    tokens = served(queue, 40)
    assert abs(tokens["idle"] - tokens["busy"]) <= 200


def test_a_newcomer_does_not_pay_for_what_others_got_before() -> None:
    queue = FairQueue()
    fill(queue, "old", 400)
    served(queue, 200)
    fill(queue, "new", 100)
    tokens = served(queue, 40)
    assert abs(tokens["new"] - tokens["old"]) <= 200


def test_settling_corrects_a_wrong_guess() -> None:
    """Both were expected to cost 100; one really costs 400 and, in the end, gets as many tokens, not as many calls."""
    queue = FairQueue()
    fill(queue, "modest", 1000)
    fill(queue, "greedy", 1000)
    tokens: Counter[str] = Counter()
    for _ in range(500):
        ticket = queue.pop()
        assert ticket is not None
        real = 400.0 if ticket.tenant == "greedy" else 100.0
        queue.settle(ticket.tenant, real - ticket.cost)
        tokens[ticket.tenant] += int(real)
    assert 0.9 <= tokens["greedy"] / tokens["modest"] <= 1.1


def test_a_call_given_back_is_not_charged_twice() -> None:
    queue = FairQueue()
    fill(queue, "ann", 20)
    fill(queue, "bob", 20)
    for _ in range(10):
        ticket = queue.pop()
        assert ticket is not None
        queue.settle(ticket.tenant, -ticket.cost)
        queue.push(ticket, front=True)
        assert queue.peek() == ticket
    assert served(queue, 20) == {"ann": 1000, "bob": 1000}


def test_one_shot_tenants_leave_nothing_behind() -> None:
    queue = FairQueue()
    empty = footprint(queue)
    for serial in range(10_000):
        queue.push(a_ticket(str(serial), f"tenant-{serial}"))
    assert queue.tenants == 10_000
    for _ in range(10_000):
        queue.pop()
    assert (queue.tenants, len(queue), queue.peek()) == (0, 0, None)
    assert footprint(queue) <= empty + 200


def test_tenants_that_leave_unserved_leave_nothing_behind() -> None:
    queue = FairQueue()
    fill(queue, "stays", 1)
    for serial in range(10_000):
        queue.push(a_ticket(str(serial) + "x", f"tenant-{serial}", cost=serial + 1.0))
        queue.remove(str(serial) + "x")
    assert queue.tenants == 1
    assert footprint(queue) < 800


def test_what_is_owed_is_forgotten_when_the_others_have_caught_up() -> None:
    queue, dice = FairQueue(), random.Random(7)
    for serial in range(2000):
        queue.push(a_ticket(str(serial), f"tenant-{serial}", cost=dice.uniform(1, 1000)))
    while queue.pop():
        pass
    fill(queue, "steady", 30, cost=100.0)
    served(queue, 30)
    assert queue.tenants == 0
    assert footprint(queue) < 800


def test_what_an_operation_touches_does_not_grow_with_the_past() -> None:
    """Dropped heap entries are swept: lines stay as long as what waits, after 20,000 operations too."""
    queue, dice = FairQueue(), random.Random(3)
    waiting: list[str] = []
    for serial in range(20_000):
        tenant = f"tenant-{dice.randrange(20)}"
        queue.push(a_ticket(str(serial), tenant, cost=dice.uniform(1, 1000)))
        waiting.append(str(serial))
        queue.settle(tenant, dice.uniform(-100, 100))
        if len(waiting) > 30:
            left = waiting.pop(dice.randrange(len(waiting)))
            queue.remove(left)
        if serial % 3 == 0 and (ticket := queue.pop()) is not None:
            waiting.remove(ticket.id)
    assert len(queue) == len(waiting) <= 31
    assert footprint(queue) < 2500


def test_settling_an_idle_debtor_often_leaves_one_entry() -> None:
    queue = FairQueue()
    queue.push(a_ticket("first", "debtor", cost=1e9))
    queue.push(a_ticket("second", "waits"))
    assert queue.pop() is not None
    for _ in range(5000):
        queue.settle("debtor", 1.0)
    assert queue.tenants == 2
    assert footprint(queue) < 800


def test_a_line_of_many_slots_counts_slots() -> None:
    queue = FairQueue()
    queue.push(a_ticket("wide", "ann", slots=8))
    queue.push(a_ticket("narrow", "bob"))
    assert (queue.slots, queue.slots_of("ann"), queue.slots_of("bob"), queue.slots_of("nobody")) == (9, 8, 1, 0)
    assert "wide" in queue
    assert queue.remove("wide") is not None
    assert queue.remove("wide") is None
    assert (queue.slots, len(queue)) == (1, 1)


def test_a_full_line_still_takes_a_tenant_below_its_share() -> None:
    """W is 4: a flood fills it, yet the light tenant enters, and the flood is told that it is the cause."""
    admission = Admission(SetLimit(1, 4), QueueRules(online_timeout=60.0, first_token_slo=60.0))
    refused = []
    for serial in range(10):
        refused.append(admission.offer(a_ticket(f"f{serial}", "flood"), 1.0))
        admission.poll(1.0)
    assert [each.reason for each in refused if each] == [Reason.PAST_KNEE] * 5
    assert admission.offer(a_ticket("l0", "light"), 1.0) is None
    assert admission.offer(a_ticket("l1", "light"), 1.0) is None
    own_doing = admission.offer(a_ticket("f10", "flood"), 1.0)
    assert own_doing is not None and own_doing.reason is Reason.FAIR_SHARE
    assert admission.offer(a_ticket("l2", "light"), 1.0) is not None
    assert admission.waiting(Band.ONLINE) == 6
    assert admission.remembered == 2


def test_an_admission_forgets_ten_thousand_callers_who_came_once() -> None:
    admission = Admission(SetLimit(4, 8), QueueRules())
    dice, now = random.Random(11), 1.0
    flying: list[str] = []
    for serial in range(10_000):
        now += 0.1
        band = Band.BATCH if serial % 5 == 0 else Band.ONLINE
        admission.offer(a_ticket(str(serial), f"tenant-{serial}", band, cost=dice.uniform(1, 1000)), now)
        admission.cancel(str(serial - 3) if serial % 7 == 0 else "")
        flying += [each.id for each in admission.poll(now) if isinstance(each, Admitted)]
        if len(flying) > 3:
            admission.finish(flying.pop(0), now)
    while flying:
        admission.finish(flying.pop(0), now)
        flying += [each.id for each in admission.poll(now) if isinstance(each, Admitted)]
    assert (admission.inflight, admission.next_deadline()) == (0, None)
    assert footprint(admission) < 1500


def test_what_calls_really_cost_is_charged_when_they_finish() -> None:
    """Both tenants are expected to cost 100 a call; greedy's cost 400, so it passes a quarter as often."""
    admission = Admission(SetLimit(1, 2000), QueueRules(online_timeout=1e6, first_token_slo=1e6))
    for serial in range(1000):
        tenant = "greedy" if serial % 2 else "modest"
        assert admission.offer(a_ticket(f"{tenant}-{serial}", tenant), 1.0) is None
    calls: Counter[str] = Counter()
    for turn in range(500):
        (passing,) = admission.poll(1.0 + turn)
        tenant = passing.id.split("-")[0]
        calls[tenant] += 1
        admission.finish(passing.id, 2.0 + turn, Sample(1, cost=400.0 if tenant == "greedy" else 100.0))
    assert 3.6 <= calls["modest"] / calls["greedy"] <= 4.4


def test_a_call_dispatched_in_vain_goes_before_whoever_came_after_it() -> None:
    """QP-11: A fails before its first byte, B of another tenant came meanwhile: A goes again, then B."""
    admission = Admission(SetLimit(1, 8), QueueRules())
    admission.offer(a_ticket("A", "ann"), 1.0)
    assert admission.poll(1.0) == [Admitted("A", 1.0)]
    admission.offer(a_ticket("B", "bob"), 1.1)
    assert admission.poll(1.1) == []
    admission.requeue("A")
    assert admission.next_deadline() == 3.0
    assert [each.id for each in admission.poll(1.2)] == ["A"]
    admission.finish("A", 1.3)
    assert [each.id for each in admission.poll(1.3)] == ["B"]
