"""The gateway's Prometheus series: counts and times of calls that ended, and what is true at the moment of a scrape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest

from gateway.core.types import Band, Record
from gateway.core.views import Snapshot
from gateway.telemetry.live import LiveGauges

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SERIES = 2000  # label combinations of one metric; a last guard, all labels come from the configuration
OTHER = "other"
BANDS = frozenset({band.label for band in Band} | {""})

WAIT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
FIRST_TOKEN = (
    0.05,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    5.0,
    7.5,
    10.0,
    15.0,
    20.0,
    30.0,
    60.0,
)
INTER_TOKEN = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
OVERHEAD = (5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 7.5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 1e-2, 2e-2, 5e-2)

M = TypeVar("M", Counter, Histogram)


class Bound(Generic[M]):
    """A metric with its children by label values: `.labels()` of the library costs more than all the rest."""

    def __init__(self, metric: M, labels: int) -> None:
        self._metric: M = metric
        self._other = (OTHER,) * labels
        self._children: dict[tuple[str, ...], M] = {}

    def of(self, *labels: str) -> M:
        """The child of these label values; past SERIES of them, the one of "other"."""
        child = self._children.get(labels)
        if child is None:
            kept = labels if len(self._children) < SERIES else self._other
            child = self._metric.labels(*kept)
            if kept is labels:
                self._children[labels] = child
        return child


class Metrics:
    """All series of the gateway in `registry`; a call is counted once, when it is over."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # The library would add a time-of-creation series to each of ours, and knows this only as a switch of its own.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry
        self._requests = self._counter(
            "requests", "Calls that ended, by how and why.", ("tenant", "pool", "band", "outcome", "reason")
        )
        self._tokens = self._counter(
            "tokens",
            "Model tokens served: prompt, completion, and prompt tokens from cache.",
            ("tenant", "pool", "kind"),
        )
        self._routes = self._counter("route", "Routing decisions, and why.", ("route", "tier", "why"))
        self._canary = self._counter("canary_requests", "Calls that ended, by release.", ("release", "outcome"))
        per_band = ("pool", "band")
        self._wait = self._histogram("wait_seconds", "Time in the gateway's queue.", per_band, WAIT)
        self._first = self._histogram("first_token_seconds", "TTFT: arrival to first token.", per_band, FIRST_TOKEN)
        self._inter = self._histogram(
            "inter_token_seconds", "ITL: mean gap between tokens of one call.", per_band, INTER_TOKEN
        )
        self._overhead = Histogram(
            "tiergate_overhead_seconds", "Time of a call in the gateway itself.", buckets=OVERHEAD, registry=registry
        )

    def watch(self, read: Callable[[], Snapshot]) -> None:
        """Add the live gauges; `read` is called at each scrape and must be quick."""
        self._registry.register(LiveGauges(read))

    def ended(self, record: Record) -> None:
        """Count a call that is over."""
        band = record.band if record.band in BANDS else OTHER
        outcome = record.outcome.value
        self._requests.of(record.tenant, record.pool, band, outcome, record.reason).inc()
        self._canary.of(record.release, outcome).inc()
        if record.why or record.tier:
            self._routes.of(record.route or OTHER, record.tier, bounded_why(record.why)).inc()
        if record.wait is not None:
            self._wait.of(record.pool, band).observe(record.wait)
        if record.first_token is not None:
            self._first.of(record.pool, band).observe(record.first_token)
        if record.inter_token is not None:
            self._inter.of(record.pool, band).observe(record.inter_token)
        self._overhead.observe(record.overhead)
        self._count_tokens(record)

    def render(self) -> bytes:
        """The exposition of the registry; its content type is CONTENT_TYPE."""
        return generate_latest(self._registry)

    def _count_tokens(self, record: Record) -> None:
        usage = record.usage
        if usage is None:
            return
        for kind, amount in (("prompt", usage.prompt), ("completion", usage.completion), ("cached", usage.cached)):
            if amount > 0:
                self._tokens.of(record.tenant, record.pool, kind).inc(amount)

    def _counter(self, name: str, told: str, labels: tuple[str, ...]) -> Bound[Counter]:
        return Bound(Counter(f"tiergate_{name}", told, labels, registry=self._registry), len(labels))

    def _histogram(self, name: str, told: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> Bound[Histogram]:
        metric = Histogram(f"tiergate_{name}", told, labels, buckets=buckets, registry=self._registry)
        return Bound(metric, len(labels))


def bounded_why(why: str) -> str:
    """A reason for a route without its score: `classifier:0.73` is `classifier`; a rule keeps its name."""
    word, _, _detail = why.partition(":")
    return why if word == "rule" else word
