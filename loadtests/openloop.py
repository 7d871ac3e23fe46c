"""Load without coordinated omission: calls leave when they are due, and every time counts from when they were due.

A generator that waits for answers before it sends on asks less of a slow server and so hides the slowness. Here the
schedule is fixed before the first call; neither a slow server nor a late generator moves it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic

from loadtests.client import Answer, Client, Ended

MOST_SECONDS = 600.0
MOST_CALLS = 200_000
_LONGEST_BACK_OFF, _BACK_OFF = 1.0, 0.1  # s that a closed-loop worker rests after a refusal

Requests = Callable[[int], bytes]  # the bytes of call number n


@dataclass(frozen=True, slots=True)
class Load:
    """Arrivals: `rate` a second for `seconds`; a call not over after `limit` seconds is hung.

    `poisson` draws exponential gaps from `seed`, otherwise they are equal. Past `most_open` calls at once nothing
    more is sent (UNSENT): that protects this machine, not the server. ValueError where the load is not bounded.
    """

    rate: float
    seconds: float
    limit: float = 30.0
    poisson: bool = True
    seed: int = 0
    most_open: int = 4000

    def __post_init__(self) -> None:
        if self.rate <= 0 or not 0 < self.seconds <= MOST_SECONDS or not 0 < self.limit <= MOST_SECONDS:
            raise ValueError(f"rate and times must be above 0, times at most {MOST_SECONDS:.0f} s")
        if self.rate * self.seconds > MOST_CALLS:
            raise ValueError(f"{self.rate * self.seconds:.0f} calls are more than the {MOST_CALLS} that are allowed")


@dataclass(frozen=True, slots=True)
class CallResult:
    """One call. Seconds; `due` from the start of the run, `late` from due to sent, `first_token` and `total` from due.

    `status` 0: nothing came back; `events` are the stream's data events without [DONE].
    """

    due: float
    late: float
    status: int
    ended: Ended
    reason: str
    tier: str
    retry_after: bool
    first_token: float | None
    total: float
    events: int

    @property
    def answered(self) -> bool:
        """Served, to the last byte."""
        return self.status == 200 and self.ended is Ended.WHOLE

    @property
    def refused(self) -> bool:
        """Turned away with a reason."""
        return self.status >= 400 and self.ended is Ended.WHOLE and bool(self.reason)

    @property
    def inter_token(self) -> float | None:
        """Mean gap between a stream's data events, s; None where there are none."""
        if self.first_token is None or self.events < 2:
            return None
        return (self.total - self.first_token) / (self.events - 1)


def arrivals(load: Load) -> Iterator[float]:
    """When the calls are due, s from the start; the same for the same load."""
    dice = random.Random(load.seed)
    due = dice.expovariate(load.rate) if load.poisson else 0.0
    while due < load.seconds:
        yield due
        due += dice.expovariate(load.rate) if load.poisson else 1.0 / load.rate


async def open_loop(client: Client, load: Load, requests: Requests) -> list[CallResult]:
    """Offer `load` and wait until every call is over; one result a call, in the order they were due."""
    results: dict[int, CallResult] = {}
    pending: set[asyncio.Task[None]] = set()
    begun = monotonic()

    async def one(number: int, due: float) -> None:
        late = monotonic() - begun - due
        answer = await client.call(requests(number), load.limit)
        results[number] = _result(answer, begun, due, late)

    try:
        for number, due in enumerate(arrivals(load)):
            early = begun + due - monotonic()
            if early > 0:
                await asyncio.sleep(early)
            elif number % 16 == 0:
                await asyncio.sleep(0)  # behind its schedule it still must read answers
            if len(pending) >= load.most_open:
                results[number] = _unsent(due)
                continue
            task = asyncio.create_task(one(number, due))
            pending.add(task)
            task.add_done_callback(pending.discard)
        await asyncio.gather(*pending)
    finally:
        for task in pending:
            task.cancel()
    return [results[number] for number in sorted(results)]


async def closed_loop(
    client: Client, workers: int, seconds: float, requests: Requests, results: list[CallResult], limit: float = 30.0
) -> None:
    """`workers` callers that each wait for an answer before they ask again, for `seconds`; fills `results` as they end.

    Returns when the last answer is there. A caller that is refused rests as it was told, at most a second.
    """
    begun = monotonic()
    over = begun + min(seconds, MOST_SECONDS)

    async def work(worker: int) -> None:
        number = worker
        while (due := monotonic()) < over:
            answer = await client.call(requests(number), limit)
            number += workers
            results.append(_result(answer, begun, due - begun, 0.0))
            if not results[-1].answered:
                rest = _BACK_OFF if answer.retry_after is None else min(answer.retry_after, _LONGEST_BACK_OFF)
                await asyncio.sleep(rest)

    async with asyncio.TaskGroup() as group:
        for worker in range(workers):
            group.create_task(work(worker))


def _result(answer: Answer, begun: float, due: float, late: float) -> CallResult:
    return CallResult(
        due=due,
        late=late,
        status=answer.status,
        ended=answer.ended,
        reason=answer.reason,
        tier=answer.tier,
        retry_after=answer.retry_after is not None,
        first_token=None if answer.first_at is None else answer.first_at - begun - due,
        total=answer.ended_at - begun - due,
        events=answer.events,
    )


def _unsent(due: float) -> CallResult:
    return CallResult(due, 0.0, 0, Ended.UNSENT, "", "", False, None, 0.0, 0)
