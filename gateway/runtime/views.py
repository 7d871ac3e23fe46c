"""What one pool looks like now: plain values out of its admission and its endpoints."""

from __future__ import annotations

from gateway.config.serving import Pool as PoolSection
from gateway.core.health import State
from gateway.core.types import Band, EndpointLoad
from gateway.core.views import EndpointView, PoolView
from gateway.pipeline.path import Lane

_STALE = 3.0  # s


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
    loads, in_flight, window = pool.loads, pool.in_flight, lane.window or pool.window
    return tuple(
        _endpoint_view(name, state, in_flight[name], loads[name], window, now) for name, state in pool.states.items()
    )


def _endpoint_view(
    name: str, state: State, in_flight: int, load: EndpointLoad | None, window: int | None, now: float
) -> EndpointView:
    return EndpointView(
        name=name,
        up=state is not State.EJECTED,
        state=state.value,
        in_flight=in_flight,
        running=load.running if load else None,
        waiting=load.waiting if load else None,
        kv_usage=load.kv_usage if load else None,
        stale=load is None or now - load.at > _STALE,
        window=window,
    )
