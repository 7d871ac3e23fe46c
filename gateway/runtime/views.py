"""What one pool looks like now: plain values out of its admission and its endpoints."""

from __future__ import annotations

from typing import TypedDict

from gateway.config.serving import Pool as PoolSection
from gateway.core.types import Band, EndpointLoad
from gateway.core.views import EndpointView, PoolView
from gateway.pipeline.path import Lane

_STALE = 3.0  # s


class EngineWords(TypedDict):
    """The part of an EndpointView that the engine itself tells."""

    running: float | None
    waiting: float | None
    kv_usage: float | None
    stale: bool


def pool_view(section: PoolSection, lane: Lane, now: float) -> PoolView:
    """One pool at `now` (monotonic seconds)."""
    admission = lane.dispatcher.admission
    endpoints = _endpoint_views(lane, now)
    return PoolView(
        name=lane.pool,
        tier=section.tier,
        in_flight={band.label: admission.in_flight(band) for band in Band},
        waiting={band.label: admission.waiting(band) for band in Band},
        limit=admission.limit.value,
        knee_in_flight=section.capacity.in_flight * len(endpoints),
        knee_waiting=section.capacity.waiting * len(endpoints),
        saturation=admission.saturation,
        forecast_first_token=admission.forecast(now),
        endpoints=endpoints,
    )


def _endpoint_views(lane: Lane, now: float) -> tuple[EndpointView, ...]:
    pool = lane.upstream
    loads, in_flight, reachable, window = pool.loads, pool.in_flight, pool.reachable, lane.window or pool.window
    return tuple(
        EndpointView(
            name=name,
            up=reachable[name],
            state=state.value,
            in_flight=in_flight[name],
            window=window,
            **_told_by_engine(loads[name], now),
        )
        for name, state in pool.states.items()
    )


def _told_by_engine(load: EndpointLoad | None, now: float) -> EngineWords:
    if load is None:
        return {"running": None, "waiting": None, "kv_usage": None, "stale": True}
    stale = now - load.at > _STALE
    return {"running": load.running, "waiting": load.waiting, "kv_usage": load.kv_usage, "stale": stale}
