"""Configuration texts for the tests, and their mistakes as (path, line, message)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gateway.config import Config, ConfigError, Mistake, loads

HASH_A = "sha256:" + "a" * 64
HASH_B = "sha256:" + "b" * 64

SMALL = f"""\
tiers: [small, large]
pools:
  small:
    tier: small
    model: Qwen
    endpoints: [{{url: "http://10.0.0.1:8000"}}]
    capacity: {{in_flight: 8, waiting: 2}}
  large:
    tier: large
    model: Qwen-large
    endpoints: [{{url: "http://10.0.0.2:8000"}}]
    capacity: {{in_flight: 8, waiting: 2}}
tenants:
  acme: {{keys: ["{HASH_A}"]}}
admin: {{keys: ["{HASH_B}"]}}
"""

# Every section, as the manual shows them.
PRODUCT = f"""\
listen: {{api: "0.0.0.0:8000", ops: "127.0.0.1:8001", server: asgi}}
store: {{url: "redis://:pa55@host:6379/0", timeout: 25ms, on_error: local}}
tiers: [small, large]
pools:
  small:
    tier: small
    model: Qwen2.5-7B-Instruct
    engine: vllm
    endpoints: [{{url: "http://10.0.0.11:8000"}}, {{url: "http://10.0.0.12:8000", weight: 1}}]
    capacity: capacity/small.yaml
    slo: {{first_token: 2s, inter_token: 60ms}}
    priority_scheduling: true
  large: {{tier: large, model: L, endpoints: [{{url: "http://10.0.0.13:8000/"}}], timeouts: {{gap: 45s}}}}
routes:
  auto:
    rules:
      - {{name: images, when: {{images: true}}, tier: large}}
      - {{name: long, when: {{prompt_tokens: ">6000"}}, tier: large}}
    classifier: {{model: default, share_large: 0.3, abstain: large}}
    default: small
    spill: {{up: true, down: [acme]}}
timeouts: {{connect: 2s, first_token: 60s, gap: 30s, body: 30s}}
keepalive: 15s
retry: {{attempts: 2, budget: 0.1}}
health: {{interval: 1s, eject_after: 3, probation: 10s}}
drain: {{delay: 2s, timeout: 30s}}
caps: {{max_tokens: {{default: 512, limit: 4096, over: clamp}}, prompt_tokens: 16384, n: 4, body: 8MiB}}
queue: {{online: {{timeout: 2s, limit: auto}}, batch: {{timeout: 1h, limit: 10000, floor: 0.02, headroom: 0.25}}}}
tenants:
  acme:
    keys: ["{HASH_A}"]
    band: online
    weight: 2
    tiers: [small, large]
    limits: {{requests: 600/min, tokens: 200000/min, concurrent: 64, budget: 50M/day}}
    caps: {{max_tokens: {{limit: 1024}}}}
canary: {{share: 0.05, stages: [5, 10, 50, 100], freeze: ["Mon-Fri 09:00-21:00 Asia/Shanghai"]}}
"""


def good(extra: str = "", env: Mapping[str, str] | None = None, text: str = SMALL) -> Config:
    """The configuration of a text that must load."""
    return loads(text + extra, env or {})


def mistakes(text: str, env: Mapping[str, str] | None = None) -> list[Mistake]:
    """The mistakes of a text that must not load."""
    with pytest.raises(ConfigError) as refused:
        loads(text, env or {})
    return refused.value.mistakes


def only(text: str, env: Mapping[str, str] | None = None) -> Mistake:
    """The one mistake of a text."""
    found = mistakes(text, env)
    assert len(found) == 1, [str(mistake) for mistake in found]
    return found[0]
