"""Quota counters in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType

from gateway.core.quota import Meter, Remaining, Reserved
from gateway.core.refusal import granted
from gateway.core.types import Call, Tenant, Usage
from gateway.core.views import TenantView


class Account:
    """A call's reservation, an async context manager: raises Refused if the tenant is over a limit.

    Set `used` to what the engine reported; left None, the call counts in no window and all is given back.
    """

    __slots__ = ("_call", "_clock", "_meter", "_reserved", "remaining", "used")

    def __init__(self, meter: Meter, call: Call, clock: Callable[[], float]) -> None:
        self._meter = meter
        self._call = call
        self._clock = clock
        self._reserved: Reserved | None = None
        self.remaining: tuple[Remaining | None, Remaining | None] = (None, None)
        self.used: Usage | None = None

    async def __aenter__(self) -> Account:
        now = self._clock()
        try:
            self._reserved = granted(self._meter.reserve(self._call, now))
        finally:
            self.remaining = self._meter.remaining(now)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            self._meter.settle(reserved, self.used, self._clock())


class MemoryQuota:
    """Meters of all configured tenants; a tenant whose limits did not change keeps its counters at a reload."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._meters: dict[str, Meter] = {}

    def configure(self, tenants: Iterable[Tenant]) -> None:
        """The tenants and limits in force from now on; calls in progress settle with the meter they reserved from."""
        known = {each.name: each.limits for each in tenants}
        kept = {name: meter for name, meter in self._meters.items() if known.get(name) == meter.limits}
        self._meters = kept | {name: Meter(limits) for name, limits in known.items() if name not in kept}

    def reserved(self, call: Call) -> Account:
        """The lease on the worst case of `call`."""
        return Account(self._meters[call.tenant.name], call, self._clock)

    def views(self) -> tuple[TenantView, ...]:
        """What every tenant has in progress and has left."""
        now = self._clock()
        return tuple(_view(name, meter, now) for name, meter in self._meters.items())


def _view(name: str, meter: Meter, now: float) -> TenantView:
    requests, tokens = meter.remaining(now)
    return TenantView(
        name=name,
        in_progress=meter.concurrent,
        requests_remaining=requests.remaining if requests else None,
        tokens_remaining=tokens.remaining if tokens else None,
    )
