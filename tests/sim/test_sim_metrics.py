from __future__ import annotations

from gateway.sim.engine import Engine
from gateway.sim.metrics import EngineMetrics, Histogram
from gateway.sim.profile import load_profile
from gateway.sim.waiting import Finish


def test_a_value_counts_in_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1]
    assert histogram.total == 12.0


def test_buckets_are_cumulative_in_the_text_and_labels_are_escaped() -> None:
    metrics = EngineMetrics('a"b', created=0.0)
    metrics.finish(Finish.STOP, seconds=0.4, prompt_tokens=3, output_tokens=30)
    metrics.finish(Finish.LENGTH, seconds=0.9, prompt_tokens=3, output_tokens=30)
    text = metrics.render(Engine(load_profile("fast"))).decode()
    name = "vllm:e2e_request_latency_seconds"
    counts = [
        line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(f"{name}_bucket{{") and 'e="0' in line
    ]
    assert counts[:4] == ["0.0", "1.0", "1.0", "2.0"]
    assert f'{name}_sum{{engine="0",model_name="a\\"b"}} 1.3' in text
    assert 'request_success_total{engine="0",finished_reason="stop",model_name="a\\"b"} 1.0' in text
