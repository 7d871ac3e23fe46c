"""Quota: never more than the burst and what flowed back, one decision over all limits, and exact settling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.quota import Bucket, Meter, Remaining, Reserved, worst_case
from gateway.core.refusal import Reason, Refusal
from gateway.core.types import Call, Limits, Prompt, Rate, Usage
from tests.core.making import a_call

MINUTE = 60.0


def asking(prompt: int, output: int = 0, choices: int = 1) -> Call:
    return a_call(prompt=Prompt(prompt), max_tokens=output, choices=choices)


def reserved(meter: Meter, call: Call, now: float) -> Reserved:
    result = meter.reserve(call, now)
    assert isinstance(result, Reserved)
    return result


def refused(meter: Meter, call: Call, now: float) -> Refusal:
    result = meter.reserve(call, now)
    assert isinstance(result, Refusal)
    return result


@given(
    burst=st.integers(1, 1000),
    period=st.sampled_from([1.0, 60.0, 86400.0]),
    asked=st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(1, 1200)), max_size=80),
)
def test_no_window_ever_admits_more_than_the_burst_and_the_rate(
    burst: int, period: float, asked: list[tuple[float, int]]
) -> None:
    bucket, now = Bucket(Rate(burst, period)), 5.0
    admitted: list[tuple[float, int]] = []
    for pause, cost in asked:
        now += pause
        if bucket.until_fits(cost, now) == 0:
            bucket.spend(cost, now)
            admitted.append((now, cost))
    for first, (start, _) in enumerate(admitted):
        total = 0
        for at, cost in admitted[first:]:
            total += cost
            assert total <= burst + (at - start) * burst / period + 1e-6


@given(
    asked=st.lists(
        st.tuples(st.floats(0.0, 30.0), st.integers(1, 400), st.none() | st.integers(0, 600)), min_size=1, max_size=60
    )
)
def test_settled_usage_stays_within_what_flowed_in(asked: list[tuple[float, int, int | None]]) -> None:
    """Reservations that come back in any order: what was really used fits burst + rate, but for the last overrun."""
    meter, now, used = Meter(Limits(tokens=Rate(1000, MINUTE))), 0.0, 0
    waiting: list[tuple[Reserved, int | None]] = []
    for serial, (pause, cost, usage) in enumerate(asked):
        now += pause
        call = meter.reserve(asking(cost), now)
        if isinstance(call, Reserved):
            held = sum(each.tokens for each, _ in waiting) + cost
            assert used + held <= 1000 + now * 1000 / MINUTE + 1e-6
            waiting.append((call, usage))
        if waiting and serial % 2:
            done, spent = waiting.pop(serial % len(waiting))
            meter.settle(done, None if spent is None else Usage(spent), now)
            used += spent or 0


def test_a_window_has_no_edge_and_the_wait_is_exact() -> None:
    meter = Meter(Limits(requests=Rate(10, MINUTE)))
    for _ in range(10):
        reserved(meter, asking(1), 59.9)
    refusal = refused(meter, asking(1), 60.1)
    assert refusal.reason is Reason.TENANT_REQUESTS
    assert refusal.retry_after == pytest.approx(6.0 - 0.2)
    refused(meter, asking(1), 60.1 + (refusal.retry_after or 0) - 0.01)
    reserved(meter, asking(1), 60.1 + (refusal.retry_after or 0))


def test_fifty_at_once_of_which_ten_fit() -> None:
    """LM-07: the reservation, not the end of the call, spends."""
    meter = Meter(Limits(tokens=Rate(1000, MINUTE)))
    results = [meter.reserve(asking(50, 50), 7.0) for _ in range(50)]
    assert [isinstance(each, Reserved) for each in results] == [True] * 10 + [False] * 40
    told = [each for each in results if isinstance(each, Refusal)]
    assert {each.reason for each in told} == {Reason.TENANT_TOKENS}
    assert all(each.retry_after == pytest.approx(6.0) for each in told)


def test_the_worst_case_counts_every_sequence() -> None:
    """LM-05."""
    assert worst_case(asking(10, 200, choices=8)) == 1610
    assert refused(Meter(Limits(tokens=Rate(1000, MINUTE))), asking(10, 200, choices=8), 0.0).param == "max_tokens"


def test_one_limit_that_refuses_spends_no_other() -> None:
    """LM-08: A runs, B is refused by concurrency, C passes; two requests are counted."""
    meter = Meter(Limits(requests=Rate(2, MINUTE), tokens=Rate(1000, MINUTE), concurrent=1))
    running = reserved(meter, asking(100), 1.0)
    before = meter.remaining(1.0)
    assert refused(meter, asking(100), 1.0).reason is Reason.TENANT_CONCURRENCY
    assert meter.remaining(1.0) == before
    meter.settle(running, Usage(100), 1.0)
    reserved(meter, asking(100), 1.0)
    assert meter.remaining(1.0)[0] == Remaining(2, 0, MINUTE)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(requests=Rate(1, MINUTE)), Reason.TENANT_REQUESTS),
        (Limits(tokens=Rate(150, MINUTE)), Reason.TENANT_TOKENS),
        (Limits(budget=Rate(150, 86400.0)), Reason.TENANT_BUDGET),
        (Limits(concurrent=1), Reason.TENANT_CONCURRENCY),
    ],
)
def test_each_limit_refuses_in_its_own_name(limits: Limits, reason: Reason) -> None:
    meter = Meter(limits)
    reserved(meter, asking(100), 3.0)
    refusal = refused(meter, asking(100), 3.0)
    assert refusal.reason is reason
    assert refusal.retry_after is not None and refusal.retry_after > 0
    assert meter.concurrent == 1


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(requests=Rate(0, MINUTE)), Reason.TENANT_REQUESTS),
        (Limits(tokens=Rate(0, MINUTE)), Reason.TENANT_TOKENS),
        (Limits(budget=Rate(0, MINUTE)), Reason.TENANT_BUDGET),
        (Limits(concurrent=0), Reason.TENANT_CONCURRENCY),
    ],
)
def test_zero_is_nothing_and_not_no_limit(limits: Limits, reason: Reason) -> None:
    refusal = refused(Meter(limits), asking(1), 9.0)
    assert (refusal.reason, refusal.retry_after) == (reason, None)  # waiting does not help


def test_no_limits_refuse_nothing() -> None:
    meter = Meter(Limits())
    for _ in range(1000):
        reserved(meter, asking(10**6), 0.0)
    assert meter.remaining(0.0) == (None, None)


def test_more_than_the_whole_limit_is_told_apart_from_a_limit_used_up() -> None:
    meter = Meter(Limits(tokens=Rate(1000, MINUTE)))
    refusal = refused(meter, asking(500, 501), 0.0)
    assert (refusal.reason, refusal.param, refusal.retry_after) == (Reason.REQUEST_EXCEEDS_QUOTA, "max_tokens", None)
    reserved(meter, asking(500, 500), 0.0)


def test_a_refund_is_exact() -> None:
    meter = Meter(Limits(requests=Rate(10, MINUTE), tokens=Rate(1000, MINUTE)))
    held = reserved(meter, asking(100, 500), 0.0)
    assert meter.remaining(0.0) == (Remaining(10, 9, 6.0), Remaining(1000, 400, 36.0))
    meter.settle(held, Usage(prompt=90, completion=10), 0.0)
    requests, tokens = meter.remaining(0.0)
    assert requests == Remaining(10, 9, 6.0)
    assert tokens is not None and tokens.remaining == 900
    assert tokens.reset == pytest.approx(6.0)
    assert meter.concurrent == 0


def test_a_call_that_was_never_served_counts_in_no_window() -> None:
    """LM-09."""
    meter = Meter(Limits(requests=Rate(3, MINUTE), tokens=Rate(300, MINUTE), budget=Rate(300, MINUTE)))
    for _ in range(30):
        meter.settle(reserved(meter, asking(100), 1.0), None, 1.0)
    assert meter.remaining(1.0) == (Remaining(3, 3, 0.0), Remaining(300, 300, 0.0))
    reserved(meter, asking(300), 1.0)


def test_a_late_refund_makes_no_more_than_a_full_bucket() -> None:
    meter = Meter(Limits(tokens=Rate(1000, MINUTE)))
    held = reserved(meter, asking(1000), 0.0)
    meter.settle(held, None, 3600.0)
    refused(meter, asking(1001), 3600.0)
    reserved(meter, asking(1000), 3600.0)
    assert refused(meter, asking(1), 3600.0).reason is Reason.TENANT_TOKENS


def test_use_beyond_the_reservation_becomes_debt() -> None:
    """LM-09: charged in full, the next request waits until the debt has flowed back."""
    meter = Meter(Limits(tokens=Rate(1000, MINUTE)))
    meter.settle(reserved(meter, asking(100), 0.0), Usage(2000), 0.0)
    left = meter.remaining(0.0)[1]
    assert left is not None and left.remaining == 0
    assert left.reset == pytest.approx(120.0)
    refusal = refused(meter, asking(10), 0.0)
    assert refusal.retry_after == pytest.approx(60.6)
    reserved(meter, asking(10), 60.7)
