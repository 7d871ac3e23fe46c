"""One turn of one gateway: saturated calls, paced streams, streams back to back, calls at a low rate."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from loadtests.client import Target, request
from loadtests.overhead.figures import Figures
from loadtests.overhead.launch import BenchError, Server
from loadtests.overhead.load import Callers, Counts, Steady, steadily
from loadtests.overhead.plan import Plan
from loadtests.overhead.procfs import memory, processor_time, spent
from loadtests.overhead.source import MODEL, asked
from loadtests.overhead.subjects import KEY
from loadtests.report import percentile

_MIB = 1024 * 1024
_BACK_TO_BACK = 500  # events of one stream
_SLOW_START = 10.0  # s that a gateway may take until its streams flow, or until they have ended
_MOST_FAILED = 0.01  # share of calls that may fail before a figure means nothing

Say = Callable[[str], None]
_SYSTEM = (
    "You are the assistant of an operations team. Answer briefly and precisely, name the figure that decides, and say "
    "so when you do not know. Never invent host names, and never suggest a restart before the cause is understood."
)
_PROMPT = "Why does a queue in front of a busy server grow without a bound, and what is the honest figure to watch?"


@dataclass(frozen=True, slots=True)
class Running:
    """One gateway, up twice: in front of the upstream of plain calls, and in front of the one of streams."""

    name: str
    calls: Server
    calls_at: Target
    streams: Server
    streams_at: Target
    headers_of_calls: tuple[tuple[str, str], ...] = ()
    headers_of_streams: tuple[tuple[str, str], ...] = ()


def chat(headers: tuple[tuple[str, str], ...], events: int | None = None, rate: int = 0) -> bytes:
    """A chat call, streamed if `events` are asked for (`rate` a second, 0: as fast as it goes)."""
    prompt = _PROMPT if events is None else f"{_PROMPT} {asked(events, rate)}"
    body = {
        "model": MODEL,
        "messages": [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": prompt}],
        "max_tokens": 256,
        "temperature": 0.7,
        "stream": events is not None,
    }
    fixed = (("authorization", f"Bearer {KEY}"), ("content-type", "application/json"), ("accept", "*/*"))
    return request("POST", "/v1/chat/completions", (*fixed, *headers), json.dumps(body).encode())


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two looks: seconds, processor time of the gateway in ns, answers, events, failures."""

    seconds: float
    cpu: int
    answers: int
    events: int
    failed: int


async def window(seconds: float, server: Server, counts: Counts) -> Window:
    """Look, wait, look again. Raises BenchError if more than one call in a hundred failed."""
    pids = server.pids
    begun, cpu = perf_counter(), processor_time(pids)
    answers, events, failed = counts.answers, counts.events, counts.failed
    await asyncio.sleep(seconds)
    used = spent(cpu, processor_time(pids))
    seen = Window(
        perf_counter() - begun, used, counts.answers - answers, counts.events - events, counts.failed - failed
    )
    if counts.failed > _MOST_FAILED * (counts.failed + counts.begun):
        raise BenchError(f"{counts.failed} calls failed, {counts.answers} did not")
    return seen


async def turn(plan: Plan, running: Running, direct: Target, say: Say) -> Figures:
    """Every figure of one round; those that cannot be had are None, and `say` is told why."""
    found: dict[str, float | None] = {}
    for phase in (_saturated, _paced, _back_to_back, _slow):
        try:
            found |= await phase(plan, running, direct)
        except (BenchError, OSError) as error:
            say(f"{running.name}: {phase.__name__.strip('_')}: {error}")
    return Figures(**found, **_memory(running))


async def _saturated(plan: Plan, running: Running, direct: Target) -> dict[str, float | None]:
    sent = chat(running.headers_of_calls)
    async with Callers(running.calls_at, sent, plan.connections, again=True) as callers:
        await asyncio.sleep(plan.warm_up)
        seen = await window(plan.seconds, running.calls, callers.counts)
    if not seen.answers:
        raise BenchError("no call was answered")
    return {
        "us_per_request": seen.cpu / 1000 / seen.answers,
        "requests_per_second": seen.answers / seen.seconds,
        "busy": seen.cpu / 1e9 / seen.seconds,
    }


async def _paced(plan: Plan, running: Running, direct: Target) -> dict[str, float | None]:
    events = round(plan.rate * (plan.seconds + plan.settle))
    sent = chat(running.headers_of_streams, events, plan.rate)
    async with Callers(running.streams_at, sent, plan.streams, again=False) as callers:
        await _until(lambda: callers.counts.begun + callers.counts.failed >= plan.streams)
        seen = await window(plan.seconds, running.streams, callers.counts)
        # The streams end by themselves: what a gateway does about callers that leave is not measured here.
        ended = await callers.finished(_SLOW_START)
    if not seen.events:
        raise BenchError("no event came")
    if not ended:
        await asyncio.sleep(plan.settle)
    return {
        "us_per_chunk": seen.cpu / 1000 / seen.events,
        "carried": seen.events / (plan.streams * plan.rate * seen.seconds),
    }


async def _back_to_back(plan: Plan, running: Running, direct: Target) -> dict[str, float | None]:
    if not plan.back_to_back:
        return {}
    sent = chat(running.headers_of_streams, _BACK_TO_BACK)
    async with Callers(running.streams_at, sent, plan.back_to_back, again=True) as callers:
        await asyncio.sleep(plan.warm_up)
        seen = await window(plan.seconds, running.streams, callers.counts)
    if not seen.events:
        raise BenchError("no event came")
    return {"us_per_chunk_back_to_back": seen.cpu / 1000 / seen.events}


async def _slow(plan: Plan, running: Running, direct: Target) -> dict[str, float | None]:
    """Times count from when a call was sent: a loop's timers are too coarse to count from when it was due."""
    through, straight = Steady(running.calls_at, chat(running.headers_of_calls)), Steady(direct, chat(()))
    async with through, straight:
        await steadily((through, straight), plan.slow_rate, plan.warm_up)
        through.times.clear()
        straight.times.clear()
        seconds = plan.seconds * plan.slow_share
        await steadily((through, straight), plan.slow_rate, seconds)
        await asyncio.sleep(0.05)  # for the last answers
        for load in (through, straight):
            if len(load.times) < (1 - _MOST_FAILED) * plan.slow_rate * seconds - 1:
                raise BenchError(
                    f"{len(load.times)} of {plan.slow_rate * seconds:.0f} calls were answered in time, "
                    f"{load.counts.failed} failed, {load.unsent} were not sent"
                )
    return {
        "added_p50_ms": _added(through, straight, 0.5),
        "added_p99_ms": _added(through, straight, 0.99),
    }


def _added(through: Steady, straight: Steady, part: float) -> float | None:
    slow, fast = percentile(through.times, part), percentile(straight.times, part)
    return None if slow is None or fast is None else (slow - fast) * 1000


def _memory(running: Running) -> dict[str, float | None]:
    both = [memory(server.pids) for server in (running.calls, running.streams)]
    return {"rss_mib": max(one.rss for one in both) / _MIB, "pss_mib": max(one.pss for one in both) / _MIB}


async def _until(holds: Callable[[], bool]) -> None:
    """Wait for streams to flow, as long as a slow gateway may take; then measure what there is."""
    begun = perf_counter()
    while not holds() and perf_counter() - begun < _SLOW_START:  # noqa: ASYNC110 (an event would cost each answer)
        await asyncio.sleep(0.005)
