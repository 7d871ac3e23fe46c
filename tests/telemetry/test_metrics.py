"""The series that dashboards and alerts rely on: names, labels, values."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from gateway.core.types import Outcome, Record, Usage
from gateway.core.views import EndpointView, PoolView, Snapshot
from gateway.telemetry import Metrics
from gateway.telemetry.metrics import SERIES, bounded_why

NOW = Snapshot(
    pools=(
        PoolView(
            name="small",
            tier="small",
            in_flight={"online": 3},
            waiting={"batch": 7},
            limit=20,
            knee_in_flight=24,
            knee_waiting=6,
            limit_factor=0.85,
            saturation=0.5,
            endpoints=(EndpointView("a:8000", up=True, in_flight=2), EndpointView("b:8000", up=False, in_flight=1)),
        ),
        PoolView(name="large", tier="large", forecast_first_token=0.4),
    ),
    store_up=False,
    config_version=3,
)


Series = tuple[str, frozenset[tuple[str, str]]]


def at(**labels: str) -> frozenset[tuple[str, str]]:
    return frozenset(labels.items())


def samples(metrics: Metrics) -> dict[Series, float]:
    text = metrics.render().decode()
    return {
        (sample.name, at(**sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def ended(*records: Record) -> dict[Series, float]:
    metrics = Metrics(CollectorRegistry())
    for record in records:
        metrics.ended(record)
    return samples(metrics)


def test_a_served_call_is_counted_everywhere() -> None:
    found = ended(
        Record(
            id="r",
            tenant="acme",
            band="online",
            route="auto",
            tier="small",
            pool="small",
            why="classifier:0.73",
            release="canary",
            wait=0.002,
            first_token=0.12,
            inter_token=0.025,
            overhead=0.0004,
            usage=Usage(prompt=100, completion=20, cached=60),
        )
    )
    assert (
        found["tiergate_requests_total", at(tenant="acme", pool="small", band="online", outcome="ok", reason="")] == 1
    )
    assert found["tiergate_canary_requests_total", at(release="canary", outcome="ok")] == 1
    assert found["tiergate_route_total", at(route="auto", tier="small", why="classifier")] == 1
    assert found["tiergate_tokens_total", at(tenant="acme", pool="small", kind="prompt")] == 100
    assert found["tiergate_tokens_total", at(tenant="acme", pool="small", kind="completion")] == 20
    assert found["tiergate_tokens_total", at(tenant="acme", pool="small", kind="cached")] == 60
    for name, amount in (("wait", 0.002), ("first_token", 0.12), ("inter_token", 0.025)):
        assert found[f"tiergate_{name}_seconds_count", at(pool="small", band="online")] == 1
        assert found[f"tiergate_{name}_seconds_sum", at(pool="small", band="online")] == pytest.approx(amount)
    assert found["tiergate_overhead_seconds_bucket", at(le="0.0003")] == 0
    assert found["tiergate_overhead_seconds_bucket", at(le="0.0005")] == 1


def test_a_refused_call_has_its_reason_and_no_times() -> None:
    found = ended(Record(id="r", outcome=Outcome.REFUSED, reason="unauthenticated", status=401))
    assert (
        found["tiergate_requests_total", at(tenant="", pool="", band="", outcome="refused", reason="unauthenticated")]
        == 1
    )
    assert not [name for name, _ in found if name.startswith(("tiergate_wait", "tiergate_route", "tiergate_first"))]


def test_the_same_labels_are_one_series() -> None:
    found = ended(*(Record(id=str(n), tenant="acme", pool="small", band="batch") for n in range(5)))
    assert found["tiergate_requests_total", at(tenant="acme", pool="small", band="batch", outcome="ok", reason="")] == 5


@pytest.mark.parametrize(
    ("why", "label"),
    [
        ("classifier:0.73", "classifier"),
        ("rule:images", "rule:images"),
        ("spill", "spill"),
        ("", ""),
        ("window:9", "window"),
    ],
)
def test_why_is_bounded(why: str, label: str) -> None:
    assert bounded_why(why) == label


def test_callers_cannot_make_series_without_end() -> None:
    metrics = Metrics(CollectorRegistry())
    for n in range(SERIES + 50):
        metrics.ended(Record(id="r", tenant=f"t{n}", band=f"b{n}"))
    counted = [labels for name, labels in samples(metrics) if name == "tiergate_requests_total"]
    assert len(counted) == SERIES + 1
    assert {dict(labels)["band"] for labels in counted} == {"other"}
    assert (
        samples(metrics)[
            "tiergate_requests_total", at(tenant="other", pool="other", band="other", outcome="other", reason="other")
        ]
        == 50
    )


def test_live_gauges_are_what_is_true_at_the_scrape() -> None:
    metrics = Metrics(CollectorRegistry())
    now = [Snapshot()]
    metrics.watch(lambda: now[0])
    assert samples(metrics)["tiergate_store_up", at()] == 1
    now[0] = NOW
    found = samples(metrics)
    assert found["tiergate_store_up", at()] == 0
    assert found["tiergate_config_version", at()] == 3
    assert found["tiergate_draining", at()] == 0
    assert found["tiergate_in_flight", at(pool="small", band="online")] == 3
    assert found["tiergate_in_flight", at(pool="small", band="batch")] == 0
    assert found["tiergate_waiting", at(pool="small", band="batch")] == 7
    assert found["tiergate_limit", at(pool="small")] == 20
    assert found["tiergate_knee_in_flight", at(pool="small")] == 24
    assert found["tiergate_knee_waiting", at(pool="small")] == 6
    assert found["tiergate_limit_factor", at(pool="small")] == 0.85
    assert found["tiergate_saturation", at(pool="small")] == 0.5
    assert found["tiergate_endpoint_up", at(pool="small", endpoint="a:8000")] == 1
    assert found["tiergate_endpoint_up", at(pool="small", endpoint="b:8000")] == 0
    assert found["tiergate_endpoint_in_flight", at(pool="small", endpoint="b:8000")] == 1


def test_what_is_unknown_has_no_sample() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.watch(lambda: NOW)
    found = samples(metrics)
    assert ("tiergate_forecast_first_token_seconds", at(pool="small")) not in found
    assert found["tiergate_forecast_first_token_seconds", at(pool="large")] == 0.4


def test_no_series_of_creation_times() -> None:
    assert not [name for name, _ in ended(Record(id="r", wait=1.0)) if name.endswith("_created")]
