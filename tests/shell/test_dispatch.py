"""Calls come, wait, leave and are cancelled in any order: each ends once, and every slot comes back."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter

import pytest

from gateway.core.admission import Admission, QueueRules
from gateway.core.limit import Sample
from gateway.core.refusal import Reason, Refusal, Refused
from gateway.core.types import Band
from gateway.dispatch import Dispatcher, Slot
from tests.core.making import SetLimit, a_ticket

PATIENT = QueueRules(online_timeout=60.0, first_token_slo=60.0)
DRAIN = Refusal(Reason.DRAINING, "over", retry_after=1.0)
ENOUGH = 5.0  # s; no test waits that long unless it fails


def dispatcher(value: int, waiting: int = 100, rules: QueueRules = PATIENT) -> Dispatcher:
    return Dispatcher(Admission(SetLimit(value, waiting), rules), asyncio.get_running_loop().time)


def limit_of(line: Dispatcher) -> SetLimit:
    limit = line.admission.limit
    assert isinstance(limit, SetLimit)
    return limit


def at_zero(line: Dispatcher) -> bool:
    admission = line.admission
    waiting = [admission.waiting(band) for band in Band]
    return admission.inflight == 0 and waiting == [0, 0] and admission.next_deadline() is None


def slots_alive() -> int:
    gc.collect()
    return sum(type(each) is Slot for each in gc.get_objects())


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Caller:
    """A task that takes a slot and holds it until told to go on; `ending` says how it went."""

    def __init__(self, line: Dispatcher, name: str, patience: float | None = None, **given: float) -> None:
        self.inside = asyncio.Event()
        self.done = asyncio.Event()
        self.ending = ""
        self.wait = -1.0
        self.sample: Sample | None = None
        tenant, band = f"tenant-{name}", Band.BATCH if name.startswith("batch") else Band.ONLINE
        arrived = asyncio.get_running_loop().time()
        ticket = a_ticket(name, tenant, band, **({"arrived": arrived} | given))
        self.task = asyncio.create_task(self._run(line.slot(ticket, patience)))

    async def _run(self, slot: Slot) -> None:
        try:
            async with slot:
                self.wait = slot.wait
                self.inside.set()
                await self.done.wait()
                slot.sample = self.sample
            self.ending = "served"
        except Refused as refused:
            self.ending = refused.refusal.reason.code
        except asyncio.CancelledError:
            self.ending = "cancelled"
            raise

    async def leave(self) -> str:
        self.done.set()
        async with asyncio.timeout(ENOUGH):
            await asyncio.wait([self.task])
        return self.ending


async def test_a_free_slot_is_taken_at_once_and_comes_back() -> None:
    line = dispatcher(1)
    async with line.slot(a_ticket("a", arrived=asyncio.get_running_loop().time())) as slot:
        assert (line.admission.inflight, slot.wait < 0.1) == (1, True)
        slot.sample = Sample(1, first_token=0.2)
    assert at_zero(line)
    assert limit_of(line).samples == [Sample(1, first_token=0.2)]


async def test_a_failure_inside_gives_the_slot_back_and_teaches_nothing() -> None:
    line = dispatcher(1)
    with pytest.raises(RuntimeError):
        async with line.slot(a_ticket("a")):
            raise RuntimeError
    assert at_zero(line)
    assert limit_of(line).samples == []


async def test_waiters_pass_in_turn() -> None:
    line = dispatcher(1)
    callers = [Caller(line, name) for name in "abc"]
    await turns(3)
    assert [each.inside.is_set() for each in callers] == [True, False, False]
    assert await callers[0].leave() == "served"
    async with asyncio.timeout(ENOUGH):
        await callers[1].inside.wait()
    assert not callers[2].inside.is_set()
    assert callers[1].wait >= 0.0
    assert [await each.leave() for each in callers[1:]] == ["served", "served"]
    assert at_zero(line)


async def test_past_the_knee_is_said_at_once() -> None:
    line = dispatcher(1, waiting=1)
    inside, waits, shed = (Caller(line, name, cost=1.0) for name in "abc")
    await turns(3)
    assert (shed.task.done(), shed.ending) == (True, "past_knee")
    assert [await inside.leave(), await waits.leave()] == ["served", "served"]
    assert at_zero(line)


async def test_a_pool_without_engines_refuses() -> None:
    line = dispatcher(0)
    with pytest.raises(Refused) as refused:
        async with line.slot(a_ticket("a")):
            pass
    assert refused.value.refusal.reason is Reason.NO_ENDPOINT
    assert at_zero(line)


async def test_the_timer_evicts_who_ran_out_of_time_though_nothing_else_happens() -> None:
    line = dispatcher(1)
    holder = Caller(line, "holder")
    await holder.inside.wait()
    started = asyncio.get_running_loop().time()
    slow, quick = Caller(line, "slow", patience=0.12), Caller(line, "quick", patience=0.04)
    async with asyncio.timeout(ENOUGH):
        await asyncio.wait([quick.task])
        assert asyncio.get_running_loop().time() - started >= 0.04
        assert not slow.task.done()
        await asyncio.wait([slow.task])
    assert asyncio.get_running_loop().time() - started >= 0.12
    assert [quick.ending, slow.ending] == ["queue_timeout", "queue_timeout"]
    assert await holder.leave() == "served"
    assert at_zero(line)


async def test_a_timer_that_rings_early_is_set_again() -> None:
    """The dispatcher's clock goes at half the speed of the loop's: the first ring comes too soon."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    line = Dispatcher(Admission(SetLimit(1, 10), PATIENT), lambda: (loop.time() - started) / 2)
    async with line.slot(a_ticket("a")):
        late = line.slot(a_ticket("b"), patience=0.03)
        async with asyncio.timeout(ENOUGH):
            with pytest.raises(Refused) as refused:
                async with late:
                    pass
    assert refused.value.refusal.reason is Reason.QUEUE_TIMEOUT
    assert late.wait >= 0.03
    assert at_zero(line)


async def test_an_id_that_is_here_already_is_an_error_and_disturbs_nobody() -> None:
    line = dispatcher(1)
    async with line.slot(a_ticket("a")):
        with pytest.raises(ValueError, match="already here"):
            async with line.slot(a_ticket("a")):
                pass
        assert line.admission.inflight == 1
    assert at_zero(line)


async def test_who_leaves_while_waiting_is_never_served() -> None:
    """QP-04: B goes while it waits; C gets the slot, and the line is shorter at once."""
    line = dispatcher(1)
    a, b, c = (Caller(line, name) for name in "abc")
    await turns(3)
    b.task.cancel()
    await turns(2)
    assert (b.ending, line.admission.waiting(Band.ONLINE)) == ("cancelled", 1)
    await a.leave()
    async with asyncio.timeout(ENOUGH):
        await c.inside.wait()
    assert not b.inside.is_set()
    assert await c.leave() == "served"
    assert at_zero(line)


async def test_a_call_cancelled_in_the_tick_of_its_turn_hands_the_slot_on() -> None:
    line = dispatcher(1)
    a, b, c = (Caller(line, name) for name in "abc")
    await turns(3)
    a.done.set()
    await turns(1)
    # B's turn has come, but its task has not run yet.
    assert (line.admission.waiting(Band.ONLINE), b.inside.is_set()) == (1, False)
    b.task.cancel()
    async with asyncio.timeout(ENOUGH):
        await c.inside.wait()
    assert (b.ending, b.inside.is_set(), line.admission.inflight) == ("cancelled", False, 1)
    assert await c.leave() == "served"
    assert at_zero(line)


async def test_a_call_cancelled_in_the_tick_of_its_eviction_ends_once() -> None:
    line = dispatcher(1)
    a, b = Caller(line, "a"), Caller(line, "b")
    await turns(2)
    line.evict_all(DRAIN)
    b.task.cancel()
    b.task.cancel()
    await turns(3)
    assert (b.ending, line.admission.inflight) == ("cancelled", 1)
    assert await a.leave() == "served"
    assert at_zero(line)


async def test_raising_the_limit_wakes_waiters_and_lowering_it_hands_nothing_on() -> None:
    """QP-10: 4 -> 1 -> 3."""
    line = dispatcher(4)
    callers = [Caller(line, str(serial), cost=1.0) for serial in range(8)]
    await turns(3)
    limit_of(line).value = 1
    for each in callers[:3]:
        await each.leave()
    await turns(3)
    assert sum(each.inside.is_set() for each in callers) == 4
    await callers[3].leave()
    await turns(3)
    assert sum(each.inside.is_set() for each in callers) == 5
    limit_of(line).value = 3
    line.pump()
    await turns(3)
    assert sum(each.inside.is_set() for each in callers) == 7
    assert [await each.leave() for each in callers[4:]] == ["served"] * 4
    assert at_zero(line)


async def test_a_closed_line_serves_who_waits_and_refuses_newcomers() -> None:
    line = dispatcher(1)
    a, b = Caller(line, "a"), Caller(line, "b")
    await turns(2)
    line.close(DRAIN)
    late = Caller(line, "late")
    await turns(2)
    assert late.ending == "draining"
    assert [await a.leave(), await b.leave()] == ["served", "served"]
    assert at_zero(line)


async def test_evicting_all_leaves_who_is_inside() -> None:
    before = slots_alive()
    line = dispatcher(1)
    inside = Caller(line, "a")
    waiting = [Caller(line, name) for name in ("b", "c", "batch-1", "batch-2")]
    await turns(2)
    line.close(DRAIN)
    line.evict_all(DRAIN)
    await turns(2)
    assert [each.ending for each in waiting] == ["draining"] * 4
    assert await inside.leave() == "served"
    assert at_zero(line)
    assert slots_alive() == before


async def storm(dice: random.Random, calls: int) -> Dispatcher:
    """`calls` callers who come, hold, are refused, give up and are cancelled once or twice, in any turn of the loop."""
    line = dispatcher(dice.choice((1, 3, 8)), waiting=dice.choice((2, 50, 1000)))
    most, endings = limit_of(line).value, Counter[str]()
    over: list[int] = []

    async def call(serial: int) -> None:
        band = dice.choice(list(Band))
        patience = dice.choice((None, None, 0.001, 0.01))
        ticket = a_ticket(str(serial), f"tenant-{dice.randrange(5)}", band, slots=dice.choice((1, 1, 2)))
        ending = "lost"
        try:
            async with line.slot(ticket, patience) as slot:
                over.append(line.admission.inflight - max(most, ticket.slots))
                await turns(dice.randrange(4))
                slot.sample = Sample(1, cost=dice.uniform(1, 500))
            ending = "served"
        except Refused as refused:
            ending = refused.refusal.reason.code
        except asyncio.CancelledError:
            ending = "cancelled"
            raise
        finally:
            endings[ending] += 1

    async def cancel(task: asyncio.Task[None]) -> None:
        await turns(dice.randrange(31))
        for _ in range(dice.choice((1, 2))):
            task.cancel()
            await turns(dice.choice((0, 1)))

    tasks = []
    for serial in range(calls):
        tasks.append(asyncio.create_task(call(serial)))
        if dice.random() < 0.6:
            tasks.append(asyncio.create_task(cancel(tasks[-1])))
        if dice.random() < 0.3:
            await asyncio.sleep(0)
    async with asyncio.timeout(ENOUGH):
        await asyncio.wait(tasks)
    never_ran = sum(each.cancelled() for each in tasks) - endings["cancelled"]
    assert sum(endings.values()) + never_ran == calls
    assert endings["lost"] == 0
    assert endings["served"] and endings["cancelled"]
    assert max(over) <= 0
    assert at_zero(line)
    return line


@pytest.mark.parametrize("seed", range(12))
async def test_a_storm_of_cancellations_leaves_nothing_behind(seed: int) -> None:
    before = slots_alive()
    line = await storm(random.Random(seed), 400)
    assert slots_alive() == before
    assert line.admission.remembered <= 10
