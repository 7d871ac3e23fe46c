"""Single decisions of the admission, told as stories: who passes, who waits, who is shed, and what is said."""

from __future__ import annotations

import pytest

from gateway.core.admission import Admission, Admitted, Evicted, QueueRules
from gateway.core.limit import Sample
from gateway.core.refusal import Reason, Refusal
from gateway.core.types import Band
from tests.core.making import SetLimit, a_ticket, footprint

BATCH = Band.BATCH
PATIENT = QueueRules(online_timeout=600.0, first_token_slo=600.0, floor=0.0, headroom=0.0)


def admission(value: int, waiting: int = 100, rules: QueueRules = PATIENT) -> Admission:
    return Admission(SetLimit(value, waiting), rules)


def offered(line: Admission, name: str, now: float = 1.0, patience: float | None = None, **given: object) -> str:
    """What came of it at once: "in", "waits" or the reason of the refusal; what else was decided is lost."""
    tenant, slots = str(given.get("tenant", "acme")), int(str(given.get("slots", 1)))
    band = BATCH if name.startswith("batch") else Band.ONLINE
    refusal = line.offer(a_ticket(name, tenant, band, arrived=now, slots=slots), now, patience)
    if refusal is not None:
        return refusal.reason.code
    return "in" if Admitted(name, 0.0) in line.poll(now) else "waits"


def passed(line: Admission, now: float = 1.0) -> list[str]:
    decided = line.poll(now)
    assert all(isinstance(each, Admitted) for each in decided)
    return [each.id for each in decided]


def test_online_goes_before_batch_that_came_first() -> None:
    line = admission(1)
    assert [offered(line, name) for name in ("a", "batch-1", "b")] == ["in", "waits", "waits"]
    line.finish("a", 2.0)
    assert passed(line) == ["b"]


def test_batch_leaves_its_headroom_free_and_online_uses_it() -> None:
    line = admission(4, rules=QueueRules(headroom=0.25, floor=0.0))
    assert [offered(line, f"batch-{serial}") for serial in range(4)] == ["in", "in", "in", "waits"]
    assert offered(line, "a") == "in"
    line.finish("a", 2.0)
    assert passed(line) == []
    line.finish("batch-0", 2.0)
    assert passed(line) == ["batch-3"]


def test_one_slot_is_left_for_batch_however_large_the_headroom() -> None:
    line = admission(4, rules=QueueRules(headroom=1.0))
    assert [offered(line, "batch-1"), offered(line, "batch-2")] == ["in", "waits"]


def test_batch_below_its_floor_goes_before_online() -> None:
    line = admission(1, rules=QueueRules(floor=0.1, first_token_slo=60.0, online_timeout=60.0))
    assert [offered(line, name) for name in ("a", "batch-1", "b", "batch-2")] == ["in", "waits", "waits", "waits"]
    line.finish("a", 2.0)
    assert passed(line) == ["batch-1"]
    line.finish("batch-1", 3.0)
    assert passed(line) == ["b"]


def test_a_wide_batch_call_whose_turn_it_is_is_not_overtaken() -> None:
    """Below its floor it waits for its three slots, and no online call takes them one by one."""
    line = admission(4, rules=QueueRules(floor=0.5, first_token_slo=60.0, online_timeout=60.0))
    assert [offered(line, name) for name in "abcd"] == ["in"] * 4
    assert [offered(line, "batch-1", slots=3), offered(line, "e")] == ["waits", "waits"]
    line.finish("a", 2.0)
    assert passed(line) == []
    line.finish("b", 2.0)
    line.finish("c", 2.0)
    assert passed(line) == ["batch-1"]


def test_a_call_wider_than_the_pool_passes_alone() -> None:
    line = admission(2)
    assert [offered(line, "a"), offered(line, "wide", slots=5), offered(line, "b")] == ["in", "waits", "waits"]
    line.finish("a", 2.0)
    assert passed(line) == ["wide"]
    assert (line.inflight, line.saturation > 1.0) == (5, True)
    line.finish("wide", 3.0)
    assert passed(line) == ["b"]


def test_a_small_batch_call_does_not_slip_into_a_full_line() -> None:
    """The head of the line needs more slots than are free: whoever comes behind it waits, and counts."""
    line = admission(4, rules=QueueRules(batch_limit=5, floor=0.0, headroom=0.25))
    assert [offered(line, "batch-0"), offered(line, "batch-1", slots=3)] == ["in", "waits"]
    assert [offered(line, f"batch-{serial}") for serial in range(2, 6)] == ["waits", "waits", "past_knee", "past_knee"]
    assert line.waiting(BATCH) == 5


def test_past_the_waiting_knee_calls_are_shed() -> None:
    """QP-08 (c): the newcomer is refused, nobody who waits is evicted."""
    line = admission(1, waiting=2)
    assert [offered(line, name) for name in "abcd"] == ["in", "waits", "waits", "past_knee"]
    assert line.waiting(Band.ONLINE) == 2


def test_what_the_engines_report_waiting_counts() -> None:
    line = admission(1, waiting=2)
    line.engine_waiting = 1
    assert [offered(line, name) for name in "abc"] == ["in", "waits", "past_knee"]


def test_the_configured_line_replaces_the_measured_one() -> None:
    line = admission(1, waiting=100, rules=QueueRules(online_limit=0))
    assert [offered(line, name) for name in "ab"] == ["in", "past_knee"]


def test_a_line_full_of_batch_takes_online_and_a_line_full_of_online_no_batch() -> None:
    """QP-08 (a), (b): the bands have lines of their own."""
    line = admission(1, waiting=2, rules=QueueRules(batch_limit=2, floor=0.0))
    assert [offered(line, name) for name in ("a", "batch-1", "batch-2", "batch-3")] == [
        "in",
        "waits",
        "waits",
        "past_knee",
    ]
    assert [offered(line, name) for name in "bcd"] == ["waits", "waits", "past_knee"]


def test_tenants_below_their_share_fill_the_line_twice_and_no_more() -> None:
    """W is 12. One tenant fills it; who comes later gets a half, a third, a quarter of it, up to 24 in all."""
    line = admission(1, waiting=12)
    assert offered(line, "in", tenant="first") == "in"
    waiting = []
    for tenant in ("ann", "bob", "cleo", "dan", "eve"):
        came = [offered(line, f"{tenant}-{turn}", tenant=tenant) for turn in range(13)]
        waiting.append(came.count("waits"))
    assert waiting == [12, 6, 4, 2, 0]
    assert line.waiting(Band.ONLINE) == 24


@pytest.mark.parametrize(("weight", "expected"), [(1.0, "past_knee"), (3.0, "waits")])
def test_the_share_of_the_line_follows_the_weight(weight: float, expected: str) -> None:
    line = admission(1, waiting=4)
    assert [offered(line, str(serial)) for serial in range(5)] == ["in"] + ["waits"] * 4
    outcomes = []
    for serial in range(3):
        refusal = line.offer(a_ticket(f"w{serial}", "other", weight=weight), 1.0)
        line.poll(1.0)
        outcomes.append("waits" if refusal is None else refusal.reason.code)
    assert outcomes == ["waits", "waits", expected]


@pytest.mark.parametrize(
    ("name", "patience", "due"),
    [("a", None, 3.0), ("a", 0.5, 1.5), ("a", 30.0, 31.0), ("batch-a", None, 11.0), ("batch-a", 5.0, 6.0)],
)
def test_the_deadline_is_the_callers_or_the_bands(name: str, patience: float | None, due: float) -> None:
    line = admission(1, rules=QueueRules(batch_timeout=10.0))
    offered(line, "holder")
    assert offered(line, name, patience=patience) == "waits"
    assert line.next_deadline() == due
    assert line.poll(due - 0.001) == []
    (evicted,) = line.poll(due)
    assert isinstance(evicted, Evicted)
    assert (evicted.id, evicted.refusal.reason) == (name, Reason.QUEUE_TIMEOUT)
    assert f"{due - 1.0:.1f} s" in evicted.refusal.message
    assert line.next_deadline() is None


def test_a_slot_that_comes_free_at_the_deadline_comes_too_late() -> None:
    line = admission(1, rules=QueueRules())
    assert [offered(line, "a"), offered(line, "b")] == ["in", "waits"]
    line.finish("a", 3.0)
    (decided,) = line.poll(3.0)
    assert isinstance(decided, Evicted)


def test_the_engines_own_time_is_taken_off_the_wait() -> None:
    """With about half a second to a first token, a call with two seconds must leave the line after 1.5 s."""
    line = admission(1, rules=QueueRules())
    for serial in range(100):
        now = serial * 10.0
        assert offered(line, str(serial), now=now) == "in"
        line.finish(str(serial), now + 1.0, Sample(1, first_token=0.5))
    offered(line, "holder", now=2000.0)
    assert offered(line, "a", now=2000.0, patience=2.0) == "waits"
    assert line.next_deadline() == pytest.approx(2001.5, abs=0.01)
    assert offered(line, "b", now=2000.0, patience=0.02) == "waits"
    assert line.next_deadline() == pytest.approx(2000.02, abs=0.001)
    line.cancel("b")
    assert offered(line, "c", now=2000.0, patience=0.3) == "waits"
    assert line.next_deadline() == pytest.approx(2000.05, abs=0.001)


def test_batch_samples_do_not_teach_the_first_token() -> None:
    line = admission(4)
    offered(line, "batch-1")
    line.finish("batch-1", 2.0, Sample(1, first_token=50.0))
    assert line.forecast(2.0) == 0.0


def test_who_cannot_be_in_time_is_told_at_once() -> None:
    """One slot, calls of two seconds: the third in line would wait four."""
    line = admission(1)
    now = 0.0
    for serial in range(10):
        assert offered(line, f"seen-{serial}", now=now) == "in"
        now += 2.0
        line.finish(f"seen-{serial}", now)
    assert offered(line, "in", now=now) == "in"
    assert offered(line, "first", now=now, patience=3.0) == "waits"
    refusal = line.offer(a_ticket("second", arrived=now), now, 3.0)
    assert refusal is not None and refusal.reason is Reason.DEADLINE_UNREACHABLE
    assert refusal.retry_after is not None and 1.0 <= refusal.retry_after <= 4.0
    assert offered(line, "patient", now=now, patience=10.0) == "waits"
    assert offered(line, "batch-1", now=now, patience=3.0) == "waits"


def test_a_pool_without_engines_refuses_and_keeps_who_waits() -> None:
    """QP-10: lowered to nothing, nobody passes; raised again, waiters do."""
    limit = SetLimit(2, 10)
    line = Admission(limit, PATIENT)
    assert [offered(line, name) for name in "abc"] == ["in", "in", "waits"]
    limit.value = 0
    line.finish("a", 2.0)
    assert (passed(line), offered(line, "d"), line.saturation) == ([], "no_endpoint", 2.0)
    limit.value = 1
    assert passed(line) == []
    limit.value = 2
    assert passed(line) == ["c"]


def test_saturation_tells_how_full_and_how_long_the_line() -> None:
    line = admission(4, waiting=4)
    seen = [line.saturation]
    for serial in range(8):
        offered(line, str(serial))
        seen.append(line.saturation)
    assert seen == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]


def test_evicting_all_takes_who_waits_and_leaves_who_flies() -> None:
    line = admission(1)
    gone = Refusal(Reason.DRAINING, "over")
    assert [offered(line, name) for name in ("a", "b", "batch-1")] == ["in", "waits", "waits"]
    assert line.evict_all(gone) == [Evicted("b", gone), Evicted("batch-1", gone)]
    assert (line.inflight, line.waiting(Band.ONLINE), line.waiting(BATCH)) == (1, 0, 0)
    assert line.next_deadline() is None


@pytest.mark.parametrize("taken", ["a", "b"])
def test_an_id_that_is_here_is_an_error(taken: str) -> None:
    line = admission(1)
    assert [offered(line, "a"), offered(line, "b")] == ["in", "waits"]
    with pytest.raises(ValueError, match="already here"):
        line.offer(a_ticket(taken), 1.0)
    line.finish("a", 2.0)
    assert passed(line) == ["b"]


def test_strangers_change_nothing() -> None:
    line = admission(1)
    line.finish("x", 1.0, Sample(1, cost=5.0))
    line.cancel("x")
    line.requeue("x")
    assert (line.inflight, line.waiting(Band.ONLINE), line.remembered) == (0, 0, 0)


def test_a_call_in_flight_cannot_be_cancelled_only_finished() -> None:
    line = admission(1)
    offered(line, "a")
    line.cancel("a")
    assert line.inflight == 1


def test_deadlines_of_callers_who_left_are_swept_behind_one_that_stays() -> None:
    line = admission(1)
    assert [offered(line, "a"), offered(line, "stays", patience=50.0)] == ["in", "waits"]
    for serial in range(5000):
        assert offered(line, f"batch-{serial}") == "waits"
        line.cancel(f"batch-{serial}")
    assert line.next_deadline() == 51.0
    assert footprint(line) < 1500


def test_who_would_only_just_be_in_time_is_told_so_too() -> None:
    """One slot, calls of two seconds (1.8 by the last ten seconds): three tenths more for the unevenness of it."""
    line = admission(1)
    now = 0.0
    for serial in range(10):
        offered(line, f"seen-{serial}", now=now)
        now += 2.0
        line.finish(f"seen-{serial}", now)
    assert offered(line, "in", now=now) == "in"
    refusal = line.offer(a_ticket("tight", arrived=now), now, 2.2)
    assert refusal is not None and refusal.reason is Reason.DEADLINE_UNREACHABLE
    assert offered(line, "fits", now=now, patience=2.4) == "waits"
