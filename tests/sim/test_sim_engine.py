from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sim.engine import Engine, Rejection, StepResult
from gateway.sim.profile import Profile, load_profile
from gateway.sim.waiting import Finish, Request

SMALL = Profile(
    name="small", t0=1.0, a=0.0, b=0.0, c=0.0, q=0.0, kv_tokens=16, block_size=4, max_num_seqs=4,
    max_num_batched_tokens=16, max_model_len=16,
)  # fmt: skip


def engine(**changes: Any) -> Engine:
    return Engine(replace(SMALL, **changes))


def ids(result: StepResult) -> list[str]:
    return [request_id for request_id, _ in result.tokens]


def test_the_first_token_comes_when_the_prompt_is_computed_and_the_last_carries_the_reason() -> None:
    sim = engine(max_num_batched_tokens=4)
    sim.add(Request("a", prompt_tokens=10, output_tokens=3, finish=Finish.STOP))
    results = [sim.step() for _ in range(5)]
    assert [result.tokens for result in results] == [[], [], [("a", None)], [("a", None)], [("a", Finish.STOP)]]
    assert [result.prefill_tokens for result in results] == [4, 4, 2, 0, 0]
    assert [result.decode_tokens for result in results] == [0, 0, 0, 1, 1]
    assert results[0].started == ["a"]
    assert sim.idle and sim.used_blocks == 0


def test_a_step_takes_what_the_formula_says() -> None:
    sim = engine(t0=1.0, a=0.1, b=10.0, c=100.0, q=1000.0, max_num_batched_tokens=4, speed=2.0)
    sim.add(Request("a", 2, 5))
    # P = 2, A = 2 * (0 + 1)
    assert sim.step().duration == pytest.approx((1.0 + 0.2 + 2000.0) / 2)
    sim.add(Request("b", 6, 1))
    # a decodes: D = 1 and reads K = 3; b prefills the other 3: P = 3, A = 3 * 1.5
    assert sim.step().duration == pytest.approx((1.0 + 0.3 + 10.0 + 300.0 + 4500.0) / 2)
    # b's chunk starts at 3: A = 3 * (3 + 1.5)
    assert sim.step().duration == pytest.approx((1.0 + 0.3 + 10.0 + 400.0 + 13500.0) / 2)


def test_decoding_goes_on_while_a_long_prompt_is_prefilled_in_chunks() -> None:
    sim = engine(max_num_batched_tokens=4)
    sim.add(Request("short", 2, 6))
    sim.step()
    sim.add(Request("long", 8, 1))
    results = [sim.step() for _ in range(3)]
    assert [ids(result) for result in results] == [["short"], ["short"], ["short", "long"]]
    assert [result.prefill_tokens for result in results] == [3, 3, 2]


def test_a_full_batch_makes_others_wait() -> None:
    sim = engine(max_num_seqs=1)
    sim.add(Request("a", 1, 2), Request("b", 1, 1))
    assert [ids(sim.step()) for _ in range(3)] == [["a"], ["a"], ["b"]]


def test_a_prompt_that_does_not_fit_the_free_blocks_waits_whole() -> None:
    sim = engine()
    sim.add(Request("a", 9, 2), Request("b", 5, 1))
    assert ids(sim.step()) == ["a"]
    assert (sim.running, sim.waiting, sim.used_blocks) == (1, 1, 3)
    assert [ids(sim.step()) for _ in range(2)] == [["a"], ["b"]]


def fill(sim: Engine, *requests: Request) -> StepResult:
    """Add requests and step until one is preempted."""
    sim.add(*requests)
    while not (result := sim.step()).preempted:
        assert not sim.idle, "nothing was preempted"
    return result


def test_fcfs_preempts_the_last_of_running_and_serves_it_again_first() -> None:
    sim = engine(max_num_seqs=2)
    result = fill(sim, Request("a", 4, 12), Request("b", 4, 8, priority=-1), Request("c", 1, 1))
    assert result.preempted == ["b"] and ids(result) == ["a"]
    assert (sim.running, sim.waiting, sim.preemptions) == (1, 2, 1)
    order = [request_id for _ in range(20) for request_id in ids(sim.step())]
    # b had 5 tokens when it lost its blocks; the 3 others follow, before c, and none comes twice.
    assert [each for each in order if each != "a"] == ["b", "c", "b", "b"]
    assert sim.idle and sim.used_blocks == 0


def test_priority_preempts_the_highest_value_even_if_it_was_already_planned() -> None:
    sim = engine(scheduling="priority")
    sim.add(Request("low", 1, 12, priority=5, arrived=1.0))
    sim.step()
    # low stands first and is planned first; high then needs its block.
    result = fill(sim, Request("high", 4, 12, priority=0, arrived=2.0))
    assert result.preempted == ["low"] and ids(result) == ["high"]
    assert result.decode_tokens == 1


def test_among_equal_priorities_the_later_arrival_is_preempted() -> None:
    sim = engine(scheduling="priority")
    result = fill(sim, Request("later", 4, 12, arrived=2.0), Request("earlier", 4, 12, arrived=1.0))
    assert result.preempted == ["later"]


def test_the_budget_of_a_planned_victim_goes_to_the_others() -> None:
    sim = engine(scheduling="priority", kv_tokens=28, max_model_len=28, max_num_batched_tokens=4)
    sim.add(Request("low", 1, 20, priority=5))
    sim.step()
    result = fill(sim, Request("high", 3, 20, priority=0), Request("long", 20, 1, priority=3))
    assert result.preempted == ["low"] and ids(result) == ["high"]
    assert result.prefill_tokens == 3  # of 4, high took one and low gave its own back


def test_nobody_joins_in_a_step_that_preempted() -> None:
    sim = engine(scheduling="priority")
    sim.add(Request("a", 4, 12), Request("b", 4, 8, priority=5))
    for _ in range(5):
        assert not sim.step().preempted
    sim.add(Request("c", 1, 1, priority=-1))  # goes before b, and would fit
    result = sim.step()
    assert result.preempted == ["b"] and result.started == []
    assert sim.step().started == ["c"]


def test_priority_serves_by_value_then_arrival() -> None:
    sim = engine(scheduling="priority", max_num_seqs=1)
    for name, priority, arrived in [("d", 10, 0.0), ("c", 0, 3.0), ("b", 0, 2.0), ("a", -1, 9.0)]:
        sim.add(Request(name, 1, 1, priority=priority, arrived=arrived))
    assert [ids(sim.step()) for _ in range(4)] == [["a"], ["b"], ["c"], ["d"]]


def test_fcfs_ignores_priority() -> None:
    sim = engine(max_num_seqs=1)
    sim.add(Request("first", 1, 1, priority=9), Request("second", 1, 1, priority=0))
    assert [ids(sim.step()) for _ in range(2)] == [["first"], ["second"]]


def test_abort_frees_running_and_waiting_ones_at_once() -> None:
    sim = engine(max_num_seqs=1)
    sim.add(Request("a", 4, 4), Request("b", 4, 4), Request("c", 1, 1))
    sim.step()
    assert sim.abort("b") and sim.abort("a")
    assert (sim.running, sim.waiting, sim.used_blocks) == (0, 1, 0)
    assert not sim.abort("a") and not sim.abort("unknown")
    assert ids(sim.step()) == ["c"]


def test_the_engines_own_limits_refuse_a_call_whole() -> None:
    sim = engine(max_queued_reqs=2)
    assert sim.add(Request("a", 1, 9)) is None
    assert sim.add(Request("b", 1, 1), Request("c", 1, 1)) is Rejection.REQUESTS
    assert sim.waiting == 1
    assert sim.add(Request("b", 1, 1)) is None
    assert sim.add(Request("d", 1, 1)) is Rejection.REQUESTS


def test_the_prefill_backlog_counts_until_the_first_token() -> None:
    sim = engine(max_queued_tokens=8, max_num_batched_tokens=4)
    assert sim.add(Request("a", 7, 2)) is None  # below the limit, so it may pass it
    assert sim.add(Request("b", 1, 1)) is None
    assert sim.add(Request("c", 1, 1)) is Rejection.TOKENS
    sim.step()
    assert sim.prefill_backlog == 8
    sim.step()
    assert sim.prefill_backlog == 0
    assert sim.add(Request("c", 1, 1)) is None


@pytest.mark.parametrize("request_", [Request("a", 0, 1), Request("a", 1, 0), Request("a", 10, 8), Request("b", 1, 1)])
def test_an_impossible_request_is_an_error(request_: Request) -> None:
    sim = engine()
    sim.add(Request("b", 1, 1))
    with pytest.raises(ValueError, match=request_.id):
        sim.add(request_)


sizes = st.tuples(st.integers(1, 12), st.integers(1, 16), st.integers(-2, 2)).map(
    lambda size: (size[0], min(size[1], 17 - size[0]), size[2])
)
actions = st.lists(st.one_of(sizes, st.just("step"), st.tuples(st.just("abort"), st.integers(0, 20))), max_size=60)


@given(
    actions=actions,
    scheduling=st.sampled_from(["fcfs", "priority"]),
    budget=st.integers(1, 16),
    seqs=st.integers(1, 5),
    blocks=st.integers(4, 8),
)
def test_every_request_ends_once_with_the_tokens_it_asked_for(
    actions: list[Any], scheduling: Any, budget: int, seqs: int, blocks: int
) -> None:
    sim = engine(scheduling=scheduling, max_num_batched_tokens=budget, max_num_seqs=seqs, kv_tokens=4 * blocks)
    asked: dict[str, Request] = {}
    aborted: set[str] = set()
    started: set[str] = set()
    got: Counter[str] = Counter()
    ended: Counter[str] = Counter()

    def step() -> None:
        before = sim.preemptions
        result = sim.step()
        assert result.prefill_tokens + result.decode_tokens <= budget
        assert sim.preemptions - before == len(result.preempted)
        assert not (result.preempted and result.started)
        assert started.isdisjoint(result.started)
        started.update(result.started)
        for request_id, finish in result.tokens:
            assert request_id not in aborted and not ended[request_id]
            got[request_id] += 1
            if finish is not None:
                assert finish is asked[request_id].finish
                ended[request_id] += 1
        assert len(ids(result)) == len(set(ids(result)))

    for action in actions:
        if action == "step":
            step()
        elif action[0] == "abort":
            name = str(action[1])
            alive = name in asked and name not in aborted and not ended[name]
            assert sim.abort(name) is alive
            aborted |= {name} if alive else set()
        else:
            request = Request(str(len(asked)), action[0], action[1], action[2], float(len(asked) // 2))
            asked[request.id] = request
            assert sim.add(request) is None
        assert 0 <= sim.used_blocks <= blocks
        assert sim.running <= seqs
        assert sim.running + sim.waiting == len(asked) - len(aborted) - sum(ended.values())

    for _ in range(sum(each.prompt_tokens + each.output_tokens for each in asked.values()) * 20 + 1):
        if sim.idle:
            break
        step()
    assert sim.idle and sim.used_blocks == 0 and sim.kv_usage == 0.0
    for name, request in asked.items():
        assert name in aborted or (got[name] == request.output_tokens and ended[name] == 1)


def closed_loop(callers: int, seconds: float) -> tuple[float, float]:
    """Requests a second, and the 95th percentile of time to first token, with so many callers at a time."""
    sim, dice, now = Engine(load_profile("7b")), random.Random(1), 0.0
    born: dict[str, float] = {}
    first: list[float] = []
    done = 0

    def ask() -> None:
        name = str(len(born))
        prompt, output = dice.lognormvariate(6.31, 1.0), dice.lognormvariate(5.19, 0.8)
        sim.add(Request(name, min(8000, round(prompt) + 1), min(1024, round(output) + 1), arrived=now))
        born[name] = now

    for _ in range(callers):
        ask()
    waiting = set(born)
    while now < seconds:
        result = sim.step()
        now += result.duration
        for name, finish in result.tokens:
            if name in waiting:
                waiting.remove(name)
                first.append(now - born[name])
            if finish is not None:
                done += 1
                waiting.add(str(len(born)))
                ask()
    return done / now, sorted(first)[int(len(first) * 0.95)]


def test_throughput_saturates_and_first_tokens_explode_past_the_knee() -> None:
    (calm, calm_first), (busy, _), (over, over_first), (most, most_first) = (
        closed_loop(callers, 40.0) for callers in (8, 64, 256, 400)
    )
    assert busy > 2.5 * calm
    assert most < 1.1 * over, "throughput still grows past the knee"
    assert calm_first < 0.5
    assert most_first > 5.0 and most_first > over_first
