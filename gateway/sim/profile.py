"""What a simulated engine is like: step-time constants, capacity, scheduling and limits, read from YAML."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml


class ProfileError(ValueError):
    """A profile that cannot be used; the message names the file and the key."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One engine.

    A step takes `t0 + a*P + b*D + c*K + q*A` seconds (divided by `speed`): P is the prefill tokens of the step,
    D its decoding sequences, K the tokens those read from the KV cache, and A the sum of
    `n * (computed + n / 2)` over the prefill chunks (attention is quadratic).

    `max_queued_reqs` and `max_queued_tokens` are the engine's own admission limits (waiting plus running
    sequences; prompt tokens still to prefill); None is "no limit". `keepalive` is in seconds.
    """

    name: str
    t0: float
    a: float
    b: float
    c: float
    q: float
    kv_tokens: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    scheduling: Literal["fcfs", "priority"] = "fcfs"
    max_queued_reqs: int | None = None
    max_queued_tokens: int | None = None
    keepalive: float = 5.0
    chars_per_token: float = 4.0
    speed: float = 1.0

    def __post_init__(self) -> None:
        for key in ("kv_tokens", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            _require(getattr(self, key) >= 1, f"{key} must be at least 1")
        for key in ("t0", "a", "b", "c", "q"):
            _require(getattr(self, key) >= 0, f"{key} must not be negative")
        for key in ("keepalive", "chars_per_token", "speed"):
            _require(getattr(self, key) > 0, f"{key} must be more than 0")
        for key in ("max_queued_reqs", "max_queued_tokens"):
            limit = getattr(self, key)
            _require(limit is None or limit >= 0, f"{key} must not be negative")
        _require(self.t0 > 0, "t0 must be more than 0: a step takes time")
        _require(self.scheduling in {"fcfs", "priority"}, "scheduling must be fcfs or priority")
        # Otherwise one sequence could need more blocks than there are, and would be preempted for ever.
        _require(self.blocks * self.block_size >= self.max_model_len, "kv_tokens must hold one max_model_len")

    @property
    def blocks(self) -> int:
        """KV cache size in blocks."""
        return self.kv_tokens // self.block_size


def load_profile(name_or_path: str | Path) -> Profile:
    """The shipped profile of that name (7b, 70b, fast), or the YAML file at that path.

    Raises ProfileError on an unknown name, an unreadable file, or a missing, unknown, repeated or ill-typed key.
    """
    shipped = resources.files("gateway.sim") / "profiles" / f"{name_or_path}.yaml"
    source = shipped if shipped.is_file() else Path(name_or_path)
    try:
        content = yaml.load(source.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ProfileError(f"profile {name_or_path}: neither a shipped profile nor a readable file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ProfileError(f"profile {name_or_path}: {error}") from error
    try:
        return _profile(content)
    except ProfileError as error:
        raise ProfileError(f"profile {name_or_path}: {error}") from error


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice; plain YAML would keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        repeated = {key for key in keys if keys.count(key) > 1}
        _require(not repeated, f"repeated keys: {', '.join(sorted(repeated))}")
        return super().construct_mapping(node, deep)


def _profile(content: object) -> Profile:
    if not isinstance(content, dict):
        raise ProfileError("must be a mapping")
    known = {field.name: field for field in fields(Profile)}
    unknown = sorted(str(key) for key in content if key not in known)
    _require(not unknown, f"unknown keys: {', '.join(unknown)}")
    missing = [name for name, field in known.items() if field.default is MISSING and name not in content]
    _require(not missing, f"missing keys: {', '.join(missing)}")
    return Profile(**{key: _typed(key, value, str(known[key].type)) for key, value in content.items()})


def _typed(key: str, value: object, kind: str) -> Any:
    if kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind.startswith("int") and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind.endswith("None") and value is None:
        return None
    if (kind == "str" or kind.startswith("Literal")) and isinstance(value, str):
        return value
    raise ProfileError(f"{key} must be {kind}, not {value!r}")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ProfileError(message)
