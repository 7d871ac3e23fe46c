"""When an endpoint is ejected, when it comes back, and what must not move it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.health import FailureKind, Health, HealthRules, State

RULES = HealthRules(eject_after=3, probation=10.0, longest=300.0, quiet=1.0, probe_quiet=5.0)
CUT = FailureKind.CUT


def ejected(kind: FailureKind = CUT, now: float = 100.0) -> Health:
    health = Health(RULES)
    for _ in range(3):
        health.failed(now, kind)
    assert health.state is State.EJECTED
    return health


def state(health: Health) -> str:
    return health.state.value


def test_three_failures_in_a_row_eject_and_two_do_not() -> None:
    health = Health(RULES)
    health.failed(1.0, CUT)
    health.failed(2.0, CUT)
    assert health.available(2.0)
    health.failed(3.0, CUT)
    assert not health.available(3.0) and health.until == 13.0 and health.changes == 1


def test_a_success_between_starts_the_count_anew() -> None:
    health = Health(RULES)
    for now in range(10):
        health.failed(float(now), CUT)
        health.failed(float(now), CUT)
        health.succeeded(float(now))
    assert health.available(10.0) and health.changes == 0


def test_callers_faults_and_lost_keep_alive_races_say_nothing() -> None:
    health = Health(RULES)
    for now in range(20):
        health.neutral(float(now))
        health.failed(float(now), FailureKind.STALE)
    assert health.available(20.0)


def test_probation_admits_one_trial_at_a_time() -> None:
    health = ejected()
    assert not health.available(109.9)
    assert health.available(110.0) and health.state is State.PROBATION
    trial = health.begin(110.0)
    assert trial
    assert not health.available(110.0) and not health.begin(110.0)
    health.succeeded(111.0, trial)
    assert state(health) == "up" and not health.begin(111.0)


def test_a_slow_trial_does_not_keep_the_last_endpoint_down() -> None:
    health = ejected()
    slow = health.begin(110.0)
    assert not health.available(110.9, last=True)
    assert health.available(111.0, last=True)
    assert not health.available(111.0)  # another endpoint serves meanwhile: nobody need take the risk
    quick = health.begin(111.0)
    assert slow and quick
    assert not health.available(111.5, last=True)
    health.succeeded(111.5, quick)
    assert state(health) == "up"
    health.failed(130.0, CUT, slow)
    assert state(health) == "up"


def test_trials_are_bounded_and_the_first_that_ends_decides() -> None:
    health, now = ejected(), 110.0
    trials: list[int] = []
    while health.available(now, last=True) and len(trials) < 100:
        trials.append(health.begin(now))
        now += 1.0
    assert len(trials) == RULES.trials and all(trials)
    health.failed(now, CUT, trials[3])
    assert state(health) == "ejected" and health.until == now + 20.0
    health.failed(now + 1.0, CUT, trials[4])
    health.succeeded(now + 1.0, trials[5])
    assert health.until == now + 20.0
    assert health.available(now + 20.0)
    later = health.begin(now + 20.0)
    health.succeeded(now + 20.0, trials[6])
    health.failed(now + 20.0, CUT, trials[7])
    health.neutral(now + 20.0, trials[8])
    assert state(health) == "probation" and not health.available(now + 20.0)
    health.succeeded(now + 21.0, later)
    assert state(health) == "up"


def test_who_leaves_during_a_trial_makes_nobody_wait_anew() -> None:
    health = ejected()
    health.begin(110.0)
    left = health.begin(111.0)
    health.neutral(111.9, left)
    assert health.available(112.0, last=True)


def test_a_neutral_end_gives_the_trial_back() -> None:
    health = ejected()
    health.neutral(111.0, health.begin(110.0))
    assert health.state is State.PROBATION and health.available(111.0)


def test_failed_trials_double_the_ejection_up_to_the_longest_and_success_resets_it() -> None:
    health = ejected(now=0.0)
    waits = []
    for _ in range(7):
        now = health.until
        health.failed(now, CUT, health.begin(now))
        waits.append(health.until - now)
    assert waits == [20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0]
    now = health.until
    health.succeeded(now, health.begin(now))
    for _ in range(3):
        health.failed(now + 5, CUT)
    assert health.until == now + 15.0


def test_calls_from_before_the_ejection_decide_nothing() -> None:
    health = ejected()
    health.failed(105.0, CUT)
    health.succeeded(106.0)
    assert state(health) == "ejected" and health.until == 110.0
    assert health.available(110.0)
    health.succeeded(110.0)
    health.failed(110.0, CUT)
    assert state(health) == "probation"


def test_flowing_tokens_outweigh_connects_that_fail_but_not_answers_that_break_off() -> None:
    for kind, state in ((FailureKind.CONNECT, State.UP), (FailureKind.TIMEOUT_FIRST, State.UP), (CUT, State.EJECTED)):
        health = Health(RULES)
        for now in (1.0, 2.0, 3.0, 4.0):
            health.progress(now)
            health.failed(now + 0.5, kind)
        assert health.state is state, kind
    health = Health(RULES)
    health.progress(0.0)
    for _ in range(3):
        health.failed(0.5, FailureKind.CONNECT)
    health.failed(1.5, FailureKind.CONNECT)
    assert health.state is State.EJECTED


def test_an_engine_that_drains_is_out_at_once_though_its_tokens_flow() -> None:
    health = Health(RULES)
    health.progress(1.0)
    health.draining(1.0)
    assert not health.available(1.0)


def test_probes_eject_only_in_silence_and_never_the_last_endpoint() -> None:
    health = Health(RULES)
    for now in range(10):
        health.progress(float(now))
        health.probed(now + 0.9, False, last=False)
    assert state(health) == "up"
    for now in range(20, 30):
        health.probed(float(now), False, last=True)
    assert state(health) == "up"
    health.probed(30.0, False, last=False)
    assert health.state is State.EJECTED


def test_alternating_probes_do_not_toggle() -> None:
    health = Health(RULES)
    for now in range(100):
        health.probed(float(now), now % 2 == 0, last=False)
    assert health.changes == 0


@pytest.mark.parametrize(("kind", "state"), [(FailureKind.CONNECT, State.PROBATION), (CUT, State.EJECTED)])
def test_a_good_probe_ends_an_ejection_early_only_where_connecting_failed(kind: FailureKind, state: State) -> None:
    health = ejected(kind)
    health.probed(101.0, True, last=False)
    assert health.state is state


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["call", "call as last", "ok", "fail", "neutral", "probe", "drain"]),
        st.integers(0, 20),
        st.sampled_from([0.1, 0.5, 1.0, 4.0, 10.0]),
    ),
    max_size=80,
)


@given(st.booleans(), STEPS)
def test_the_trial_is_never_lost_and_trials_stay_bounded(out: bool, steps: list[tuple[str, int, float]]) -> None:
    """Whatever happened: one trial at a time (a few as the last endpoint), and once all have ended, a call can go."""
    rules = HealthRules(trials=3)
    health, now = Health(rules), 0.0
    if out:
        health.draining(now)
    calls: list[int] = []
    for step, which, pause in steps:
        now += pause
        before = health.state
        if step.startswith("call"):
            if health.available(now, last=step != "call"):
                number = health.begin(now)
                assert bool(number) is (health.state is State.PROBATION)
                assert not number or calls.count(number) < (1 if step == "call" else rules.trials)
                calls.append(number)
        elif step == "probe":
            health.probed(now, which % 2 == 0, last=False)
        elif calls:
            trial = calls.pop(which % len(calls))
            ended(health, step, now, trial)
            if not trial and before is not State.UP:
                assert health.state is before
    for trial in calls:
        health.neutral(now, trial)
    assert health.available(now + rules.longest)


@given(st.lists(st.floats(0.0, 50.0), min_size=1, max_size=15), st.floats(1.0, 5.0))
def test_while_trials_hang_another_gets_through_each_second(leavings: list[float], pause: float) -> None:
    """Trials that never end, but for callers that leave: the last endpoint is never shut for longer than a second."""
    health, now = ejected(), 110.0
    for leaving in leavings:
        assert health.available(now, last=True)
        trial = health.begin(now)
        now += pause
        if leaving < 10.0:
            health.neutral(now - 0.5, trial)
    assert health.available(now, last=True)


def ended(health: Health, how: str, now: float, trial: int) -> None:
    if how == "ok":
        health.succeeded(now, trial)
    elif how == "fail":
        health.failed(now, CUT, trial)
    elif how == "drain":
        health.draining(now, trial)
    else:
        health.neutral(now, trial)
