"""Names under which engines report their load: one table, newest name first."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Signal(StrEnum):
    """What is read from an engine's metrics."""

    WAITING = "waiting"
    RUNNING = "running"
    KV_USAGE = "kv_usage"
    PREEMPTIONS = "preemptions"
    BLOCK_SIZE = "kv_block_size"
    BLOCKS = "kv_blocks"


@dataclass(frozen=True, slots=True)
class Alias:
    """A metric that carries `signal`: its name, the label it must have, or the label that holds the value."""

    signal: Signal
    name: str
    only: tuple[str, str] | None = None
    in_label: str | None = None


def _sglang(prefix: str) -> tuple[Alias, ...]:
    return (
        Alias(Signal.WAITING, f"{prefix}num_queue_reqs"),
        Alias(Signal.RUNNING, f"{prefix}num_running_reqs"),
        Alias(Signal.KV_USAGE, f"{prefix}token_usage"),
        Alias(Signal.PREEMPTIONS, f"{prefix}num_retracted_reqs"),
        Alias(Signal.BLOCK_SIZE, f"{prefix}page_size"),
        Alias(Signal.BLOCKS, f"{prefix}num_pages"),
        Alias(Signal.BLOCK_SIZE, f"{prefix}cache_config_info", in_label="page_size"),
        Alias(Signal.BLOCKS, f"{prefix}cache_config_info", in_label="num_pages"),
    )


_TRITON = "nv_trt_llm_request_metrics"
_TRITON_KV = "nv_trt_llm_kv_cache_block_metrics"

ALIASES: tuple[Alias, ...] = (
    Alias(Signal.WAITING, "vllm:num_requests_waiting"),
    Alias(Signal.RUNNING, "vllm:num_requests_running"),
    Alias(Signal.KV_USAGE, "vllm:kv_cache_usage_perc"),
    Alias(Signal.KV_USAGE, "vllm:gpu_cache_usage_perc"),
    Alias(Signal.PREEMPTIONS, "vllm:num_preemptions"),
    Alias(Signal.BLOCK_SIZE, "vllm:cache_config_info", in_label="block_size"),
    Alias(Signal.BLOCKS, "vllm:cache_config_info", in_label="num_gpu_blocks"),
    *_sglang("sglang:"),
    *_sglang("sglang_"),
    Alias(Signal.WAITING, "tgi_queue_size"),
    Alias(Signal.RUNNING, "tgi_batch_current_size"),
    Alias(Signal.WAITING, "trtllm_num_requests_waiting"),
    Alias(Signal.RUNNING, "trtllm_num_requests_running"),
    Alias(Signal.KV_USAGE, "trtllm_kv_cache_utilization"),
    Alias(Signal.BLOCK_SIZE, "trtllm_kv_cache_tokens_per_block"),
    Alias(Signal.BLOCKS, "trtllm_kv_cache_max_blocks"),
    Alias(Signal.WAITING, _TRITON, only=("request_type", "waiting")),
    Alias(Signal.RUNNING, _TRITON, only=("request_type", "scheduled")),
    Alias(Signal.KV_USAGE, _TRITON_KV, only=("kv_cache_block_type", "fraction")),
    Alias(Signal.BLOCK_SIZE, _TRITON_KV, only=("kv_cache_block_type", "tokens_per")),
    Alias(Signal.BLOCKS, _TRITON_KV, only=("kv_cache_block_type", "max")),
    Alias(Signal.WAITING, "nv_inference_pending_request_count"),
)

NAMES: frozenset[str] = frozenset(alias.name for alias in ALIASES)
