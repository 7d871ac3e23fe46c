"""A pool of engines: who gets the call, when another one is tried, and that nothing is ever left held."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from gateway.core.health import FailureKind, HealthRules, State
from gateway.core.refusal import Reason, Refused
from gateway.core.retry import RetryBudget
from gateway.core.types import Endpoint, Usage
from gateway.upstream.pool import EngineError, Outgoing, Pool, Relay, Timeouts, UpstreamFailed
from gateway.upstream.watch import Watch
from tests.fakes.upstream import (
    LAST_CHUNK,
    STREAM_HEAD,
    FakeUpstream,
    Peer,
    RefusedPort,
    Script,
    answers,
    by_path,
    chat_events,
    chunk,
    event,
    json_response,
    response,
    silent,
    stream_response,
    until,
)

CALL = Outgoing(b"POST", b"/v1/chat/completions", (), b"{}")
WORDS = chat_events("Hel", "lo", usage=(7, 2))
FINE = answers(stream_response(WORDS))
BUSY = json_response({"error": {"message": "The engine is currently busy", "code": 503}}, 503)
DRAINING = json_response({"error": {"message": "cannot schedule new futures after shutdown", "code": 500}}, 500)
BUSY_INSIDE = stream_response([event({"error": {"message": "backlog", "code": 503}}), event(b"[DONE]")])


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class House:
    """Engines, and a pool that prefers the first of them as long as all are idle."""

    def __init__(self, pool: Pool, engines: list[FakeUpstream], clock: Clock) -> None:
        self.pool = pool
        self.engines = engines
        self.clock = clock

    @property
    def asked(self) -> list[int]:
        return [len(engine.requests) for engine in self.engines]


@asynccontextmanager
async def house(
    *scripts: Script | RefusedPort,
    budget: RetryBudget | None = None,
    timeouts: Timeouts | None = None,
    prefix: str = "",
    limit: int | None = None,
    interval: float = 1.0,
) -> AsyncIterator[House]:
    clock = Clock()
    async with AsyncExitStack() as stack:
        engines, endpoints = [], []
        for number, script in enumerate(scripts):
            if isinstance(script, RefusedPort):
                url = script.url
            else:
                engines.append(await stack.enter_async_context(FakeUpstream(script)))
                url = engines[-1].url
            endpoints.append(Endpoint(f"e{number}", url + prefix))
        pool = Pool(
            "small",
            endpoints,
            clock=clock,
            dice=lambda: 0.0,
            per_endpoint_limit=limit,
            timeouts=timeouts,
            rules=HealthRules(),
            budget=budget,
            interval=interval,
        )
        try:
            yield House(pool, engines, clock)
            assert set(pool.in_flight.values()) <= {0}
        finally:
            await pool.stop()


async def read(relay: Relay) -> bytes:
    parts = []
    while data := await relay.read():
        parts.append(data)
    return b"".join(parts)


async def call(pool: Pool, stream: bool = True, first: float | None = 5.0) -> tuple[bytes, Relay]:
    async with pool.opened(CALL, stream=stream, hide_usage=False, first_timeout=first) as relay:
        return await read(relay), relay


async def failure(pool: Pool, first: float | None = 5.0) -> UpstreamFailed:
    with pytest.raises(UpstreamFailed) as caught:
        await call(pool, first=first)
    return caught.value


def cutting(data: bytes) -> Script:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(data)

    return script


async def test_a_call_is_answered_counted_and_given_back() -> None:
    async with house(FINE, prefix="/base/") as home:
        async with home.pool.opened(CALL, stream=True, hide_usage=True, first_timeout=5.0) as relay:
            assert home.pool.in_flight == {"e0": 1}
            assert await read(relay) == b"".join(WORDS[:3] + WORDS[4:])
            assert (relay.endpoint, relay.attempts, relay.usage) == ("e0", 1, Usage(7, 2))
        assert home.engines[0].requests[0].target == "/base/v1/chat/completions"


async def test_calls_are_counted_before_they_are_sent_so_a_burst_spreads() -> None:
    async with house(silent, silent) as home:
        tasks = [asyncio.ensure_future(call(home.pool)) for _ in range(6)]
        await asyncio.sleep(0)
        assert home.pool.in_flight == {"e0": 3, "e1": 3}
        await until(lambda: home.asked == [3, 3])
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert home.pool.in_flight == {"e0": 0, "e1": 0}
        await until(lambda: all(engine.open == 0 for engine in home.engines))


async def test_a_full_endpoint_is_passed_over_but_an_admitted_call_is_always_sent() -> None:
    async with house(FINE, limit=1) as home, AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(home.pool.opened(CALL, stream=True, hide_usage=False, first_timeout=5.0))
        assert home.pool.in_flight == {"e0": 2}


SHORT_OF_ONE_BYTE = {"busy": BUSY, "draining": DRAINING, "closed": b"", "only a head": STREAM_HEAD}


@pytest.mark.parametrize(
    ("bad", "stream"),
    [*((data, stream) for data in SHORT_OF_ONE_BYTE.values() for stream in (True, False)), (BUSY_INSIDE, True)],
)
async def test_another_endpoint_is_tried_before_the_first_byte(bad: bytes, stream: bool) -> None:
    good = FINE if stream else answers(json_response({"ok": 1}))
    async with house(cutting(bad), good) as home:
        body, relay = await call(home.pool, stream)
        assert body == (b"".join(WORDS) if stream else b'{"ok": 1}')
        assert (relay.endpoint, relay.attempts, home.pool.retries, home.asked) == ("e1", 2, 1, [1, 1])


async def test_a_refused_connection_goes_elsewhere_even_without_a_budget() -> None:
    with RefusedPort() as nobody:
        async with house(nobody, FINE, budget=RetryBudget(ratio=0.0, reserve=0.0)) as home:
            for _ in range(3):
                assert (await call(home.pool))[1].endpoint == "e1"
            assert home.pool.states == {"e0": State.EJECTED, "e1": State.UP}
            assert home.pool.available() == 1
            assert (await call(home.pool))[1].attempts == 1


async def test_two_attempts_at_most() -> None:
    async with house(answers(BUSY), answers(BUSY), FINE) as home:
        _, relay = await call(home.pool)
        assert (relay.status, relay.attempts, home.asked) == (503, 2, [1, 1, 0])


async def test_never_after_a_timeout() -> None:
    async with house(silent, FINE) as home:
        failed = await failure(home.pool, first=0.05)
        assert (failed.kind, failed.endpoint, failed.attempts) == (FailureKind.TIMEOUT_FIRST, "e0", 1)
        assert home.asked == [1, 0]


async def test_never_after_the_first_byte() -> None:
    async with house(cutting(STREAM_HEAD + chunk(WORDS[0]) + chunk(WORDS[1])), FINE) as home:
        assert (await failure(home.pool)).kind is FailureKind.CUT
        assert home.asked == [1, 0]


@pytest.mark.parametrize("status", [400, 404, 500])
async def test_an_answer_that_others_would_give_too_stands(status: int) -> None:
    body = json_response({"error": {"message": "no"}}, status)
    async with house(answers(body), FINE) as home:
        _, relay = await call(home.pool)
        assert (relay.status, home.asked) == (status, [1, 0])


async def test_a_stream_of_one_endpoint_that_begins_with_an_error_is_an_engine_error() -> None:
    async with house(answers(BUSY_INSIDE)) as home:
        with pytest.raises(EngineError) as caught:
            await call(home.pool)
        assert (caught.value.status, caught.value.endpoint, caught.value.attempts) == (503, "e0", 1)


async def test_retries_stay_within_their_budget() -> None:
    async with house(answers(BUSY), answers(BUSY), budget=RetryBudget(ratio=0.1, reserve=5.0)) as home:
        for _ in range(100):
            await call(home.pool)
        assert 110 <= sum(home.asked) <= 120


async def test_no_endpoint_is_a_refusal_with_a_time_to_come_back() -> None:
    async with house(cutting(b"")) as home:
        for _ in range(3):
            await failure(home.pool)
        with pytest.raises(Refused) as caught:
            await call(home.pool)
        refusal = caught.value.refusal
        assert (refusal.reason, refusal.retry_after) == (Reason.NO_ENDPOINT, 10.0)
        assert home.pool.available() == 0


async def test_after_its_time_an_endpoint_gets_one_trial_whose_first_token_frees_the_rest() -> None:
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        if len(home.engines[0].peers) > 3:
            await peer.send(STREAM_HEAD)
            await go.wait()
            await peer.send(chunk(WORDS[0]))
            await peer.client_left()

    async with house(script) as home:
        for _ in range(3):
            await failure(home.pool)
        home.clock.now += 10.0
        assert home.pool.available() == 1
        trial = asyncio.ensure_future(call(home.pool))
        await until(lambda: home.asked == [4])
        assert home.pool.available() == 0
        go.set()
        await until(lambda: home.pool.available() == 1)
        assert home.pool.states == {"e0": State.UP} and not trial.done()
        trial.cancel()
        await asyncio.wait([trial])


async def test_one_long_plain_trial_does_not_keep_a_whole_pool_down() -> None:
    async def script(peer: Peer) -> None:
        while await peer.request() is not None:
            if len(home.engines[0].peers) == 4:
                await peer.client_left()  # the trial: a long answer, of which nothing is seen until all is there
            elif len(home.engines[0].peers) > 4:
                await peer.send(json_response({"ok": 1}))
            else:
                return

    async with house(script) as home:
        for _ in range(3):
            await failure(home.pool)
        home.clock.now += 10.0
        slow = asyncio.ensure_future(call(home.pool, stream=False, first=60.0))
        await until(lambda: home.asked == [4])
        with pytest.raises(Refused):
            await call(home.pool, stream=False)
        home.clock.now += 1.0
        assert home.pool.available() == 1
        assert (await call(home.pool, stream=False))[0] == b'{"ok": 1}'
        assert home.pool.states == {"e0": State.UP} and not slow.done()
        slow.cancel()
        await asyncio.wait([slow])
        assert home.pool.states == {"e0": State.UP}


async def test_a_slow_trial_is_no_reason_to_risk_another_call_while_others_serve() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        if len(home.engines[0].peers) > 3:
            await peer.client_left()

    async with house(script, FINE, budget=RetryBudget(ratio=0.0, reserve=0.0)) as home:
        for _ in range(3):
            await failure(home.pool)
        home.clock.now += 10.0
        slow = asyncio.ensure_future(call(home.pool))
        await until(lambda: home.asked[0] == 4)
        home.clock.now += 5.0
        assert home.pool.available() == 1
        for _ in range(3):
            assert (await call(home.pool))[1].endpoint == "e1"
        assert home.asked == [4, 3]
        slow.cancel()
        await asyncio.wait([slow])


async def test_an_answer_that_is_no_answer_counts_and_is_not_asked_for_elsewhere() -> None:
    async with house(answers(response(b"<html>", kind="text/html")), FINE) as home:
        for _ in range(3):
            assert (await failure(home.pool)).kind is FailureKind.PROTOCOL
        assert home.asked == [3, 0]
        assert home.pool.states == {"e0": State.EJECTED, "e1": State.UP}


async def test_a_caller_who_leaves_during_a_trial_gives_it_back() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        if len(home.engines[0].peers) > 3:
            await peer.client_left()

    async with house(script) as home:
        for _ in range(3):
            await failure(home.pool)
        home.clock.now += 10.0
        trial = asyncio.ensure_future(call(home.pool))
        await until(lambda: home.asked == [4])
        trial.cancel()
        await asyncio.wait([trial])
        assert home.pool.available() == 1 and home.pool.states == {"e0": State.PROBATION}


@pytest.mark.parametrize(("patience", "state"), [(0.01, State.UP), (0.05, State.EJECTED)])
async def test_a_callers_own_short_patience_says_nothing_of_the_engine(patience: float, state: State) -> None:
    async with house(silent, timeouts=Timeouts(first_token=0.05)) as home:
        for _ in range(3):
            await failure(home.pool, first=patience)
        assert home.pool.states == {"e0": state}


async def test_callers_errors_do_not_eject() -> None:
    too_long = json_response({"error": {"message": "input of 9000 tokens is over the 8192 limit"}}, 500)
    async with house(answers(*[json_response({}, 400)] * 10, *[too_long] * 10, stream_response(WORDS))) as home:
        statuses = [(await call(home.pool))[1].status for _ in range(21)]
        assert statuses == [400] * 20 + [200]
        assert home.pool.changes == 0


async def test_a_draining_engine_is_left_alone_at_once() -> None:
    async with house(answers(DRAINING), FINE) as home:
        await call(home.pool)
        assert home.pool.states == {"e0": State.EJECTED, "e1": State.UP}
        await call(home.pool)
        assert home.asked == [1, 2]


async def test_an_engine_that_asks_for_a_rest_gets_it_while_another_can_serve() -> None:
    async with house(answers(response(b"{}", 429, extra="retry-after: 5\r\n")), FINE) as home:
        for _ in range(3):
            assert (await call(home.pool))[1].status == 200
        assert home.asked == [1, 3]
        home.clock.now += 5.0
        await call(home.pool)
        assert home.asked == [2, 4]


async def test_the_only_engine_is_asked_although_it_wants_a_rest() -> None:
    async with house(answers(response(b"{}", 429, extra="retry-after: 5\r\n"), stream_response(WORDS))) as home:
        assert [(await call(home.pool))[1].status for _ in range(2)] == [429, 200]


async def test_everything_is_given_back_whatever_went_wrong() -> None:
    """RST before the head, RST in the middle, good answers, callers that leave: the counts end at 0."""

    async def script(peer: Peer) -> None:
        await peer.request()
        if peer.number % 4 == 0:
            peer.reset()
        elif peer.number % 4 == 1:
            await peer.send(STREAM_HEAD + chunk(WORDS[0]))
            await asyncio.sleep(0.01)
            peer.reset()
        elif peer.number % 4 == 2:
            await peer.send(stream_response(WORDS))
        else:
            await peer.client_left()

    async with house(script, script) as home:

        async def one() -> None:
            with suppress(UpstreamFailed, Refused, TimeoutError):
                await asyncio.wait_for(call(home.pool), 0.3)

        for _ in range(5):
            await asyncio.gather(*(one() for _ in range(20)))
            assert set(home.pool.in_flight.values()) == {0}
            home.clock.now += 300.0
        await until(lambda: all(engine.open == 0 for engine in home.engines))


METRICS = b"vllm:num_requests_waiting 3\nvllm:num_requests_running 1\n"
ENGINE = by_path(
    {
        "/metrics": response(METRICS, kind="text/plain"),
        "/v1/models": json_response({"data": [{"max_model_len": 4096}]}),
        "/v1/chat/completions": stream_response(WORDS),
    },
    response(),
)


async def test_watching_gives_live_views_and_does_not_count_as_traffic() -> None:
    with RefusedPort() as nobody:
        async with house(ENGINE, nobody, ENGINE, interval=0.02) as home:
            assert (home.pool.window, home.pool.engine_waiting(home.clock.now)) == (None, 0)
            await home.pool.start()
            await until(lambda: home.pool.engine_waiting(home.clock.now) == 6.0)
            await until(lambda: home.pool.states["e1"] is State.EJECTED)
            assert home.pool.window == 4096
            assert home.pool.loads["e1"] is None
            assert set(home.pool.in_flight.values()) == {0}
            assert home.pool.available() == 2


async def test_stale_load_counts_as_none_and_traffic_goes_on() -> None:
    async with house(ENGINE, interval=0.02) as home:
        await home.pool.start()
        await until(lambda: home.pool.engine_waiting(home.clock.now) == 3.0)
        home.engines[0].script = FINE
        await home.pool.stop()
        load = home.pool.loads["e0"]
        assert load is not None and home.pool.engine_waiting(load.at + 3.1) == 0.0


async def test_stop_ends_open_answers_and_leaves_no_socket() -> None:
    async with house(silent, interval=0.02) as home:
        await home.pool.start()
        waiting = asyncio.ensure_future(failure(home.pool))
        await until(lambda: any(r.method == "POST" for r in home.engines[0].requests))
        await home.pool.stop()
        assert (await waiting).kind in (FailureKind.CUT, FailureKind.CONNECT)
        await until(lambda: home.engines[0].open == 0)


async def test_a_replay_on_a_stale_connection_is_counted_and_is_no_second_attempt() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + b"".join(chunk(data) for data in WORDS) + LAST_CHUNK)
        if peer.number == 0:
            await peer.request()
        else:
            await peer.client_left()

    async with house(script) as home:
        await call(home.pool)
        assert (await call(home.pool))[1].attempts == 1
        assert home.pool.replays == 1


async def test_a_background_task_that_dies_is_told_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    runs = 0
    again = asyncio.Event()

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise RuntimeError("a bug")
        again.set()
        await asyncio.sleep(60)

    watch = Watch("watch small/e0", work, pause=0.01)
    with caplog.at_level(logging.ERROR):
        watch.start()
        await asyncio.wait_for(again.wait(), 5.0)
    assert "watch small/e0" in caplog.text and "a bug" in caplog.text
    await watch.stop()
    await watch.stop()
    assert watch.crashes == 1


def test_an_endpoint_must_have_an_http_url() -> None:
    with pytest.raises(ValueError):
        Pool("small", [Endpoint("e", "ftp://x")], clock=Clock(), dice=lambda: 0.0)
