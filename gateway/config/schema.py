"""The shape of the whole configuration file; with its two halves the only place where defaults are written."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, PrivateAttr

from gateway.config.asking import Admin, Canary, CapsSection, Queue, Route, Tenant
from gateway.config.fields import Name, Seconds, named, rows, short_store
from gateway.config.serving import Drain, Health, Listen, Log, Pool, Retry, Section, Store, Timeouts


class Config(Section):
    """Everything the gateway is told, checked and complete; attributes are named as the keys of the file.

    `keepalive` in seconds, 0 is off. `tiers` are cheapest first. `canary` is None when the file has none.
    """

    listen: Listen = Listen()
    store: Annotated[Store, BeforeValidator(short_store)] = Store()
    tiers: Annotated[tuple[Name, ...], rows(least=1)]
    pools: Annotated[dict[Name, Pool], named("pool")]
    routes: Annotated[dict[Name, Route], named("route", least=0)] = Field(default_factory=dict)
    timeouts: Timeouts = Timeouts()
    keepalive: Seconds = 15.0
    retry: Retry = Retry()
    health: Health = Health()
    drain: Drain = Drain()
    caps: CapsSection = CapsSection()
    queue: Queue = Queue()
    tenants: Annotated[dict[Name, Tenant], named("tenant")]
    canary: Canary | None = None
    admin: Admin = Admin()
    log: Log = Log()
    _warnings: tuple[str, ...] = PrivateAttr(default=())

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed but worth a look, as sentences with their paths."""
        return self._warnings

    def resolved(
        self,
        *,
        pools: dict[str, Pool],
        routes: dict[str, Route],
        tenants: dict[str, Tenant],
        caps: CapsSection,
        warnings: tuple[str, ...],
    ) -> Self:
        """The same configuration with effective values filled in."""
        config = self.model_copy(update={"pools": pools, "routes": routes, "tenants": tenants, "caps": caps})
        config._warnings = warnings
        return config
