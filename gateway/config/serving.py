"""The serving half of the configuration: listeners, store, pools, and how engines are treated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr

from gateway.config.fields import (
    AddressField,
    Count,
    Flag,
    Fraction,
    Name,
    PositiveCount,
    PositiveSeconds,
    Seconds,
    Secret,
    StoreUrl,
    Text,
    WebAddress,
    Weight,
    one_of,
    rows,
)
from gateway.config.values import Address

OnError = Annotated[str, one_of("local", "closed", "open")]


class Section(BaseModel):
    """A part of the file: frozen, without coercion, and no key it does not know."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Listen(Section):
    """Where the gateway listens, and which server face speaks HTTP."""

    api: AddressField = Address("0.0.0.0", 8000)
    ops: AddressField = Address("127.0.0.1", 8001)
    server: Annotated[str, one_of("asgi", "direct")] = "asgi"


class Store(Section):
    """Where counters live; `timeout` of one operation in seconds; `on_error` while the store is away."""

    url: StoreUrl = "memory"
    timeout: PositiveSeconds = 0.025
    on_error: OnError = "local"

    @property
    def shared(self) -> bool:
        """Whether several processes see the same counters."""
        return self.url != "memory"


class EngineEndpoint(Section):
    """One engine server; `weight` scales its share of the traffic, `name` (default host:port) is its label."""

    url: WebAddress
    weight: Weight = 1.0
    name: Name | None = None

    @property
    def label(self) -> str:
        """Its name in metrics, logs and the console."""
        return self.name or self.url.split("://", 1)[1]


class Capacity(Section):
    """The knee of one endpoint: calls it serves well at once, and calls that may wait in it.

    The defaults are a safe guess for a pool that was never measured.
    """

    in_flight: PositiveCount = 64
    waiting: Count = 16


@dataclass(frozen=True, slots=True)
class CapacityFile:
    """Where a pool's measured capacity is written, and what else the file says (empty while it does not exist)."""

    path: Path
    notes: Mapping[str, object]


class Slo(Section):
    """What a pool promises, in seconds."""

    first_token: PositiveSeconds = 2.0
    inter_token: PositiveSeconds = 0.06


class Timeouts(Section):
    """Of an engine (connect, first token, gap between events) and of a slow client (body), in seconds; 0 is 0."""

    connect: Seconds = 2.0
    first_token: Seconds = 60.0
    gap: Seconds = 30.0
    body: Seconds = 30.0


class Pool(Section):
    """The endpoints that serve one model of one tier.

    `window` is the context length in tokens (None: learnt from the engine), `api_key` is sent to the engine.
    After loading, `timeouts` holds the effective values, `capacity` those of the capacity file.
    """

    tier: Name
    model: Text
    engine: Annotated[str, one_of("vllm", "sglang", "tgi", "trtllm")] = "vllm"
    endpoints: Annotated[tuple[EngineEndpoint, ...], rows(least=1)]
    capacity: Capacity = Capacity()
    slo: Slo = Slo()
    priority_scheduling: Flag = False
    window: PositiveCount | None = None
    timeouts: Timeouts = Timeouts()
    api_key: Secret | None = None
    _capacity_file: CapacityFile | None = PrivateAttr(default=None)

    @property
    def capacity_file(self) -> CapacityFile | None:
        """The file that `capacity` names, which need not exist yet; None when capacity is inline or absent."""
        return self._capacity_file

    def resolved(self, timeouts: Timeouts, capacity_file: CapacityFile | None) -> Self:
        """The same pool with what other places of the file, and the capacity file, say about it."""
        pool = self.model_copy(update={"timeouts": timeouts})
        pool._capacity_file = capacity_file
        return pool


class Retry(Section):
    """Upstream tries of one call before its first byte (0 and 1 both mean one), and the share of calls tried again."""

    attempts: Count = 2
    budget: Fraction = 0.1


class Health(Section):
    """Probe interval in seconds, failures in a row that eject, and the first probation in seconds."""

    interval: PositiveSeconds = 1.0
    eject_after: PositiveCount = 3
    probation: PositiveSeconds = 10.0


class Drain(Section):
    """Seconds between "not ready" and refusing, and seconds for open calls to end."""

    delay: Seconds = 2.0
    timeout: Seconds = 30.0


class Log(Section):
    """The least level written, and a file for the lines (None: standard output)."""

    level: Annotated[str, one_of("debug", "info", "warning", "error")] = "info"
    file: Text | None = None
