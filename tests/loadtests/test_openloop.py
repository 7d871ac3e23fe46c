from __future__ import annotations

import asyncio
import statistics
import time
from itertools import pairwise

import pytest

from loadtests.client import Client, Ended, request
from loadtests.openloop import CallResult, Load, arrivals, closed_loop, open_loop
from tests.loadtests.server import STREAM, Server, refusal, stream, until


def ask(number: int) -> bytes:
    return request("POST", "/", (), b"%d" % number)


def test_uniform_arrivals_have_equal_gaps() -> None:
    assert list(arrivals(Load(10.0, 0.5, poisson=False))) == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_poisson_arrivals_have_exponential_gaps() -> None:
    dues = list(arrivals(Load(200.0, 100.0, seed=4)))
    gaps = [later - earlier for earlier, later in pairwise(dues)]
    assert len(dues) == pytest.approx(20_000, rel=0.03)
    assert statistics.fmean(gaps) == pytest.approx(1 / 200, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 200, rel=0.05)  # exponential: as large as the mean
    assert sum(gap > 2 / 200 for gap in gaps) / len(gaps) == pytest.approx(0.135, abs=0.01)
    assert dues[-1] < 100.0


def test_arrivals_are_those_of_their_seed() -> None:
    first, again, other = (list(arrivals(Load(50.0, 2.0, seed=seed))) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(("rate", "seconds", "limit"), [(0, 1, 1), (1, 0, 1), (1, 601, 1), (1, 1, 0), (100_000, 60, 1)])
def test_a_load_is_bounded(rate: float, seconds: float, limit: float) -> None:
    with pytest.raises(ValueError, match=r"must be above 0|more than"):
        Load(rate, seconds, limit)


async def test_every_call_has_a_result_in_order() -> None:
    async with Server(stream) as server, Client(server.target) as client:
        load = Load(200.0, 0.5, seed=3)
        results = await open_loop(client, load, ask)
    assert [each.due for each in results] == list(arrivals(load))
    assert all(each.answered and each.events == 3 for each in results)
    assert server.received == len(results)


async def test_a_stalled_server_shows_in_the_latencies_of_all_who_came_meanwhile() -> None:
    go_on = asyncio.Event()

    async def stalled(number: int, head: bytes, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        writer.write(STREAM)

    async with Server(stalled) as server, Client(server.target) as client:
        run = asyncio.create_task(open_loop(client, Load(100.0, 0.3, poisson=False), ask))
        await until(lambda: server.received == 30)  # nobody waits for the answers before: all are sent when due
        go_on.set()
        results = await run
    assert len(results) == 30
    for each in results:
        assert each.first_token is not None
        assert each.due + each.first_token > results[-1].due  # nothing came before the last had been sent
        assert each.total >= each.first_token
    assert results[0].total > results[-1].total + 0.2


async def test_a_late_generator_shows_in_the_latencies_too() -> None:
    def slow(number: int) -> bytes:
        if number == 2:
            time.sleep(0.25)  # the whole process stands still
        return ask(number)

    async with Server(stream) as server, Client(server.target) as client:
        results = await open_loop(client, Load(100.0, 0.2, poisson=False), slow)
    assert len(results) == 20
    behind = [each for each in results if 0.03 < each.due < 0.15]
    assert behind
    for each in behind:
        assert each.late > 0.05
        assert each.total > each.late > 0.02 + 0.25 - each.due - 0.02


async def test_calls_past_the_most_that_may_be_open_are_counted_as_unsent() -> None:
    async def silent(number: int, head: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with Server(silent) as server, Client(server.target) as client:
        results = await open_loop(client, Load(100.0, 0.2, limit=1.0, poisson=False, most_open=5), ask)
    assert [each.ended for each in results] == [Ended.HUNG] * 5 + [Ended.UNSENT] * 15
    assert server.received == 5


async def test_a_run_ends_though_the_server_never_answers() -> None:
    async def silent(number: int, head: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with asyncio.timeout(5), Server(silent) as server, Client(server.target) as client:
        results = await open_loop(client, Load(100.0, 0.1, limit=0.1), ask)
    assert results
    assert {each.ended for each in results} == {Ended.HUNG}


async def test_closed_loop_callers_wait_for_their_answers() -> None:
    open_now = most = 0

    async def counting(number: int, head: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.005)
        open_now -= 1
        writer.write(STREAM)

    results: list[CallResult] = []
    async with Server(counting) as server, Client(server.target) as client:
        await closed_loop(client, 4, 0.2, ask, results)
    assert most == 4
    assert len(results) == server.received > 8
    assert all(each.answered for each in results)


async def test_a_refused_closed_loop_caller_rests() -> None:
    async def refusing(number: int, head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(refusal())

    results: list[CallResult] = []
    async with Server(refusing) as server, Client(server.target) as client:
        await closed_loop(client, 2, 0.3, ask, results)
    assert all(each.refused for each in results)
    assert 2 <= server.received <= 8
