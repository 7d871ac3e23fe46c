"""Gauges that are read at the moment of a scrape, from one snapshot of the gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.core.types import Band
from gateway.core.views import PoolView, Snapshot


class LiveGauges(Collector):
    """Turns a Snapshot into gauges; what is unknown has no sample rather than a 0."""

    def __init__(self, read: Callable[[], Snapshot]) -> None:
        self._read = read

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Nothing: keeps the registry from reading a snapshot when this is registered."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The gauges now."""
        now = self._read()
        yield plain("store_up", "1 while the store answers.", now.store_up)
        yield plain("config_version", "Configurations applied since the start.", now.config_version)
        yield plain("draining", "1 while no new calls are taken.", now.draining)
        yield banded("in_flight", "Calls being served.", ((pool, pool.in_flight) for pool in now.pools))
        yield banded("waiting", "Calls waiting in the gateway.", ((pool, pool.waiting) for pool in now.pools))
        yield from (pooled(name, told, value, now.pools) for name, told, value in POOL_GAUGES)
        yield from endpoints(now.pools)


POOL_GAUGES: tuple[tuple[str, str, Callable[[PoolView], float | None]], ...] = (
    ("limit", "Calls admitted at once now.", lambda pool: pool.limit),
    ("knee_in_flight", "Measured knee: calls in flight.", lambda pool: pool.knee_in_flight),
    ("knee_waiting", "Measured knee: calls waiting in the engines.", lambda pool: pool.knee_waiting),
    ("limit_factor", "What live signals make of the knee (kappa).", lambda pool: pool.limit_factor),
    ("saturation", "How full the pool is; 1 is full.", lambda pool: pool.saturation),
    ("forecast_first_token_seconds", "Expected TTFT of a call that comes now.", lambda pool: pool.forecast_first_token),
)


def plain(name: str, told: str, value: float) -> GaugeMetricFamily:
    """A gauge without labels."""
    return GaugeMetricFamily(f"tiergate_{name}", told, value=float(value))


def banded(name: str, told: str, pools: Iterable[tuple[PoolView, Mapping[str, int]]]) -> GaugeMetricFamily:
    """A gauge by pool and band; a band nobody uses is 0."""
    family = GaugeMetricFamily(f"tiergate_{name}", told, labels=("pool", "band"))
    for pool, counts in pools:
        for band in Band:
            family.add_metric((pool.name, band.label), float(counts.get(band.label, 0)))
    return family


def pooled(
    name: str, told: str, value: Callable[[PoolView], float | None], pools: Iterable[PoolView]
) -> GaugeMetricFamily:
    """A gauge by pool."""
    family = GaugeMetricFamily(f"tiergate_{name}", told, labels=("pool",))
    for pool in pools:
        amount = value(pool)
        if amount is not None:
            family.add_metric((pool.name,), float(amount))
    return family


def endpoints(pools: Iterable[PoolView]) -> Iterator[GaugeMetricFamily]:
    """Gauges by endpoint."""
    up = GaugeMetricFamily("tiergate_endpoint_up", "1 while calls are sent there.", labels=("pool", "endpoint"))
    busy = GaugeMetricFamily("tiergate_endpoint_in_flight", "Our calls open there.", labels=("pool", "endpoint"))
    for pool in pools:
        for endpoint in pool.endpoints:
            up.add_metric((pool.name, endpoint.name), float(endpoint.up))
            busy.add_metric((pool.name, endpoint.name), float(endpoint.in_flight))
    yield up
    yield busy
