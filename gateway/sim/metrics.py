"""vLLM's Prometheus metrics of the simulated engine: counters, histograms and their text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from gateway.sim.engine import Engine, Rejection
from gateway.sim.waiting import Finish

CONTENT_TYPE = "content-type: text/plain; version=1.0.0; charset=utf-8\r\n"
BROKEN = b'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0",model_name= \x00 NaNopq\n'

_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_INTER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0)

# The names before vLLM 0.11; a scraper must know both.
_OLD_NAMES = MappingProxyType(
    {
        "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
        "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
    }
)
_REASONS = ("stop", "length", "abort", "error", "repetition")


class Histogram:
    """Counts per bucket; `bounds` ascend."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class EngineMetrics:
    """What one engine counted since `created` (wall clock, seconds); the gauges are read when rendered."""

    def __init__(self, model: str, created: float) -> None:
        self._labels = {"engine": "0", "model_name": model}
        self._created = created
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(_REASONS, 0)
        self.rejected = dict.fromkeys(Rejection, 0)
        self.first_token = Histogram(_TTFT)
        self.inter_token = Histogram(_INTER_TOKEN)
        self.latency = Histogram(_LATENCY)
        self.queued = Histogram(_LATENCY)
        self.prompt_sizes = Histogram(_TOKENS)
        self.output_sizes = Histogram(_TOKENS)

    def finish(self, reason: Finish, seconds: float, prompt_tokens: int, output_tokens: int) -> None:
        """Count a sequence that ended well. Like vLLM's, these never see an aborted one."""
        self.finished[reason] += 1
        self.latency.observe(seconds)
        self.prompt_sizes.observe(prompt_tokens)
        self.output_sizes.observe(output_tokens)

    def render(self, engine: Engine, old_names: bool = False) -> bytes:
        """The exposition text."""
        lines: list[str] = []
        waiting = float(engine.waiting)
        reasons = {"capacity": waiting, "deferred": 0.0}
        self._metric(lines, "num_requests_running", "gauge", [({}, engine.running)])
        self._metric(lines, "num_requests_waiting", "gauge", [({}, waiting)])
        if not old_names:
            by_reason = [({"reason": reason}, value) for reason, value in reasons.items()]
            self._metric(lines, "num_requests_waiting_by_reason", "gauge", by_reason)
        self._metric(lines, "kv_cache_usage_perc", "gauge", [({}, engine.kv_usage)])
        self._counter(lines, "num_preemptions", [({}, engine.preemptions)])
        self._counter(lines, "prompt_tokens", [({}, self.prompt_tokens)])
        self._counter(lines, "generation_tokens", [({}, self.generation_tokens)])
        finished = [({"finished_reason": reason}, count) for reason, count in self.finished.items()]
        self._counter(lines, "request_success", finished)
        if not old_names:
            rejected = [({"reason": rejection.label}, count) for rejection, count in self.rejected.items()]
            self._counter(lines, "admission_rejections", rejected)
        self._histogram(lines, "request_prompt_tokens", self.prompt_sizes)
        self._histogram(lines, "request_generation_tokens", self.output_sizes)
        self._histogram(lines, "time_to_first_token_seconds", self.first_token)
        self._histogram(lines, "inter_token_latency_seconds", self.inter_token)
        self._histogram(lines, "e2e_request_latency_seconds", self.latency)
        self._histogram(lines, "request_queue_time_seconds", self.queued)
        size, blocks = str(engine.profile.block_size), str(engine.profile.blocks)
        cache = {"block_size": size, "cache_dtype": "auto", "enable_prefix_caching": "False", "num_gpu_blocks": blocks}
        self._metric(lines, "cache_config_info", "gauge", [(cache, 1)])
        text = "\n".join(lines) + "\n"
        for new, old in _OLD_NAMES.items() if old_names else ():
            text = text.replace(new, old)
        return text.encode()

    def _metric(
        self, lines: list[str], name: str, kind: str, samples: Iterable[tuple[Mapping[str, str], float]]
    ) -> None:
        lines.append(f"# HELP vllm:{name} {name.replace('_', ' ')} of the simulated engine.")
        lines.append(f"# TYPE vllm:{name} {kind}")
        lines.extend(self._sample(name, labels, value) for labels, value in samples)

    def _counter(self, lines: list[str], name: str, samples: list[tuple[dict[str, str], int]]) -> None:
        self._metric(lines, f"{name}_total", "counter", samples)
        self._metric(lines, f"{name}_created", "gauge", [(labels, self._created) for labels, _ in samples])

    def _histogram(self, lines: list[str], name: str, histogram: Histogram) -> None:
        seen = 0
        samples = []
        for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            seen += count
            samples.append(({"le": bound}, float(seen)))
        self._metric(lines, name, "histogram", [])
        lines.extend(self._sample(f"{name}_bucket", labels, value) for labels, value in samples)
        lines.append(self._sample(f"{name}_count", {}, seen))
        lines.append(self._sample(f"{name}_sum", {}, histogram.total))
        self._metric(lines, f"{name}_created", "gauge", [({}, self._created)])

    def _sample(self, name: str, labels: Mapping[str, str], value: float) -> str:
        # Sorted, as prometheus_client writes them.
        pairs = sorted({**self._labels, **labels}.items())
        text = ",".join(f'{key}="{_escaped(text)}"' for key, text in pairs)
        return f"vllm:{name}{{{text}}} {float(value)!r}"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
