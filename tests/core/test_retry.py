"""Second attempts stay a bounded share of first ones."""

from __future__ import annotations

from gateway.core.retry import RetryBudget


def test_retries_are_bounded_by_reserve_and_ratio() -> None:
    budget = RetryBudget(ratio=0.1, reserve=5.0, refill=0.0)
    spent = 0
    for _ in range(100):
        budget.earn(0.0)
        spent += budget.spend(0.0)
    assert 14 <= spent <= 15


def test_a_quiet_gateway_gets_its_reserve_back_with_time_and_no_more() -> None:
    budget = RetryBudget(ratio=0.0, reserve=2.0, refill=0.5)
    assert [budget.spend(0.0) for _ in range(3)] == [True, True, False]
    assert not budget.spend(1.0)
    assert budget.spend(2.0)
    assert [budget.spend(1000.0) for _ in range(3)] == [True, True, False]


def test_earned_retries_are_kept_only_up_to_the_most() -> None:
    budget = RetryBudget(ratio=1.0, reserve=1.0, refill=0.0, most=3.0)
    for _ in range(50):
        budget.earn(0.0)
    assert [budget.spend(0.0) for _ in range(4)] == [True, True, True, False]


def test_a_clock_that_steps_back_takes_nothing() -> None:
    budget = RetryBudget(reserve=1.0)
    budget.earn(100.0)
    assert budget.spend(50.0)
