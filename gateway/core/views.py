"""What the gateway looks like at one moment: plain values that metrics, console and doctor read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EndpointView:
    """One engine server now.

    `state` is a word of the health module (for example "up", "ejected", "probation"); `in_flight` are the calls
    this gateway has open there; `running`, `waiting` and `kv_usage` (0..1) are the engine's own last figures and
    `window` its context length in tokens, each None while unknown, never 0; `stale` says the figures are too old.
    """

    name: str
    up: bool
    state: str = "up"
    in_flight: int = 0
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    stale: bool = False
    window: int | None = None


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool now: calls by band label, the limit in force, and the knee it is bounded by.

    `limit`, `knee_in_flight` and `knee_waiting` count calls over the whole pool; `limit_factor` is kappa;
    `saturation` is 1.0 when the pool is full; `forecast_first_token` is in seconds, None while unknown.
    """

    name: str
    tier: str
    in_flight: Mapping[str, int] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)
    limit: int = 0
    knee_in_flight: int = 0
    knee_waiting: int = 0
    limit_factor: float = 1.0
    saturation: float = 0.0
    forecast_first_token: float | None = None
    endpoints: tuple[EndpointView, ...] = ()


@dataclass(frozen=True, slots=True)
class TenantView:
    """One tenant now: calls in progress, and what its limits leave (None: not limited)."""

    name: str
    in_progress: int
    requests_remaining: int | None = None
    tokens_remaining: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole gateway now; `config_version` counts the configurations applied since the start."""

    pools: tuple[PoolView, ...] = ()
    tenants: tuple[TenantView, ...] = ()
    store_up: bool = True
    config_version: int = 1
    draining: bool = False
