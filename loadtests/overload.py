"""The overload check: offer a multiple of a pool's capacity, then look whether every promise was kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from time import monotonic, process_time

from gateway.core.refusal import Reason
from loadtests.client import Client, Target, request
from loadtests.gauges import Gauges, GaugesError, read
from loadtests.openloop import MOST_SECONDS, CallResult, Load, closed_loop, open_loop
from loadtests.report import Summary, milliseconds, spread, summarise

ALLOWED = frozenset(reason.code for reason in (Reason.PAST_KNEE, Reason.DEADLINE_UNREACHABLE, Reason.FAIR_SHARE))
QUICK = 0.05  # s within which a refused caller knows
_LOOK = 0.05  # s between looks at the gauges

Say = Callable[[str], None]


class OverloadError(Exception):
    """The check cannot be made."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to offer to whom. `load` is a multiple of the capacity (calls/s, None: measure it), times in seconds.

    `slo` bounds the P99 first token of answered calls; a call is hung after `limit`. Rates are counted from `warm_up`
    on, the capacity over `measured` after it; `settle` after the last answer nothing may be in flight or in line.
    """

    api: Target
    ops: Target
    key: str
    model: str
    pool: str
    load: float = 3.0
    seconds: float = 30.0
    slo: float = 2.0
    capacity: float | None = None
    batch_key: str | None = None
    batch_workers: int = 16
    max_tokens: int = 100
    limit: float = 30.0
    seed: int = 0
    warm_up: float = 3.0
    measured: float = 8.0
    settle: float = 2.0

    def requests(self, key: str, name: str) -> Callable[[int], bytes]:
        """Call number n with `key`: a short prompt of its own, streamed."""
        headers = (("authorization", f"Bearer {key}"), ("content-type", "application/json"))

        def numbered(number: int) -> bytes:
            prompt = f"Load test {name} {self.seed}-{number}: say something about queues and their lengths."
            messages = [{"role": "user", "content": prompt}]
            asked = {"model": self.model, "stream": True, "max_tokens": self.max_tokens, "messages": messages}
            return request("POST", "/v1/chat/completions", headers, json.dumps(asked).encode())

        return numbered


@dataclass(frozen=True, slots=True)
class Promise:
    """One thing the gateway promises under overload, whether it held, and the figure."""

    name: str
    holds: bool
    told: str


@dataclass(frozen=True, slots=True)
class Left:
    """Slots in flight and in line when the time to settle was over, and how long it took until both were 0, s."""

    in_flight: float
    waiting: float
    after: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A check. Rates in calls a second; `generator_cores` is the processor time this process used, in cores."""

    capacity: float
    offered: float
    online: Summary
    served: float
    batch_answered: int
    batch_rate: float
    queue_timeouts: int
    left: Left
    generator_cores: float
    promises: tuple[Promise, ...]

    @property
    def kept(self) -> bool:
        """Whether every promise held."""
        return all(promise.holds for promise in self.promises)


async def overload(plan: Plan, say: Say) -> Outcome:
    """Measure the capacity, overload the pool, look. Raises OverloadError if the gateway cannot be had."""
    async with Client(plan.ops) as ops, Client(plan.api) as api:
        try:
            limit = int((await read(ops)).total("tiergate_limit", pool=plan.pool))
            capacity = plan.capacity or await _capacity(plan, api, limit, say)
            return await _overloaded(plan, ops, api, capacity, say)
        except GaugesError as error:
            raise OverloadError(str(error)) from error


async def _capacity(plan: Plan, api: Client, limit: int, say: Say) -> float:
    """Answers a second with as many callers as the pool has places."""
    if limit < 1:
        raise OverloadError(f"pool {plan.pool} has no place: is one of its engines up?")
    seconds = plan.warm_up + plan.measured
    say(f"capacity: {limit} callers for {seconds:.0f} s")
    results: list[CallResult] = []
    await closed_loop(api, limit, seconds, plan.requests(plan.key, "capacity"), results, plan.limit)
    measured = _rate(results, plan.warm_up, seconds)
    if not measured:
        seen = sorted({each.reason or f"{each.ended.value} {each.status}" for each in results})
        raise OverloadError(f"no call was answered while the capacity was measured ({', '.join(seen)})")
    return measured


async def _overloaded(plan: Plan, ops: Client, api: Client, capacity: float, say: Say) -> Outcome:
    offered = plan.load * capacity
    say(f"capacity {capacity:.1f} calls/s; offering {offered:.1f}/s for {plan.seconds:.0f} s")
    load = Load(offered, plan.seconds, plan.limit, seed=plan.seed)
    batch: list[CallResult] = []
    begun, used = monotonic(), process_time()
    async with Client(plan.api) as nightly:
        workers = asyncio.create_task(_batch(plan, nightly, batch))
        try:
            online = await open_loop(api, load, plan.requests(plan.key, "online"))
            cores = (process_time() - used) / (monotonic() - begun)
        finally:
            # Who still waits hangs up: the gateway has to notice that, too.
            workers.cancel()
            await asyncio.gather(workers, return_exceptions=True)
    left = await _left(plan, ops)
    steady = min(plan.warm_up, plan.seconds / 2)
    return Outcome(
        capacity=capacity,
        offered=offered,
        online=summarise(online),
        served=_rate(online, steady, plan.seconds),
        batch_answered=sum(each.answered and each.due + each.total < plan.seconds for each in batch),
        batch_rate=_rate(batch, steady, plan.seconds),
        queue_timeouts=sum(each.reason == Reason.QUEUE_TIMEOUT.code for each in online),
        left=left,
        generator_cores=cores,
        promises=promises(plan, online, left),
    )


def _rate(results: list[CallResult], begin: float, end: float) -> float:
    """Answers a second that came from `begin` to `end` (s from the start)."""
    return sum(each.answered and begin <= each.due + each.total < end for each in results) / (end - begin)


async def _batch(plan: Plan, client: Client, results: list[CallResult]) -> None:
    """Batch callers that ask again and again until they are cancelled."""
    if plan.batch_key is not None and plan.batch_workers > 0:
        requests = plan.requests(plan.batch_key, "batch")
        await closed_loop(client, plan.batch_workers, MOST_SECONDS, requests, results, MOST_SECONDS)


async def _left(plan: Plan, ops: Client) -> Left:
    """What is still in the pool, looked at until it is empty or the time to settle is over."""
    begun = monotonic()
    while True:
        gauges: Gauges = await read(ops)
        flying, waiting = (gauges.total(f"tiergate_{name}", pool=plan.pool) for name in ("in_flight", "waiting"))
        passed = monotonic() - begun
        if not flying and not waiting:
            return Left(flying, waiting, passed)
        if passed >= plan.settle:
            return Left(flying, waiting, None)
        await asyncio.sleep(_LOOK)


def promises(plan: Plan, online: list[CallResult], left: Left) -> tuple[Promise, ...]:
    """What the gateway promises under overload, checked on the results of the online calls."""
    summary = summarise(online)
    first = summary.first_token.p99
    refused = [each for each in online if each.refused]
    foreign = sorted({each.reason for each in refused} - ALLOWED)
    unsaid = sum(not each.retry_after for each in refused)
    knew = spread(each.total for each in refused).p99
    odd = sum(summary.failed.values())
    return (
        Promise("calls are answered", summary.answered > 0, f"{summary.answered} of {summary.sent}"),
        Promise(f"P99 first token <= {plan.slo:g} s", (first or inf) <= plan.slo, milliseconds(first)),
        Promise(f"refused only by {', '.join(sorted(ALLOWED))}", not foreign, ", ".join(foreign) or "yes"),
        Promise("every refusal says when to come back", not unsaid, f"{unsaid} do not" if unsaid else "yes"),
        Promise(f"P99 refusal < {QUICK * 1000:.0f} ms", (knew or 0.0) < QUICK, milliseconds(knew)),
        Promise("nothing fails", not odd, f"{odd} did" if odd else "yes"),
        Promise("nothing hangs", not summary.hung + summary.unsent, f"{summary.hung} hung, {summary.unsent} unsent"),
        Promise(
            f"the pool is empty {plan.settle:g} s later",
            left.after is not None,
            f"{left.in_flight:.0f} in flight, {left.waiting:.0f} waiting",
        ),
    )


def verdict(outcome: Outcome) -> list[str]:
    """The figures beside the summary, and the promises, as plain text."""
    share = outcome.served / outcome.capacity
    return [
        f"capacity {outcome.capacity:.1f}/s, offered {outcome.offered:.1f}/s, answered in the window "
        f"{outcome.served:.1f}/s ({share:.0%} of capacity), queue_timeout {outcome.queue_timeouts}",
        f"batch served {outcome.batch_answered} ({outcome.batch_rate:.2f}/s), "
        f"generator used {outcome.generator_cores:.2f} cores",
        *(f"{'kept  ' if each.holds else 'BROKEN'}  {each.name}: {each.told}" for each in outcome.promises),
    ]
