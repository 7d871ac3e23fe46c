"""One endpoint as its pool sees it, and the lease that a call holds on it from pick to last byte."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from gateway.core.health import FailureKind, Health, HealthRules
from gateway.core.types import Endpoint
from gateway.upstream.client import Answer, HttpClient, Outgoing, UpstreamFailed
from gateway.upstream.relay import EngineError, Relay
from gateway.upstream.verdict import Verdict, rest_time

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits on one call, seconds; None is no limit, 0 is at once.

    `first_token` is what an engine may usually take to the first data event: a call with less patience than
    that says nothing of the engine when it gives up. `gap` is between data events, or pieces of another body,
    all of which must be here within the limit on a first token.
    """

    connect: float = 2.0
    first_token: float | None = 60.0
    gap: float | None = 30.0


@dataclass(frozen=True, slots=True)
class Order:
    """One call as the pool sends it; `patience` in seconds from the write to the first token, None: no limit."""

    outgoing: Outgoing
    stream: bool
    hide_usage: bool
    patience: float | None


class Seat:
    """Clients, health and count of one endpoint; a new object whenever the endpoint is configured anew."""

    def __init__(
        self, endpoint: Endpoint, timeouts: Timeouts, rules: HealthRules, clock: Clock, tls: ssl.SSLContext | None
    ) -> None:
        url = urlsplit(endpoint.url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"endpoint {endpoint.name}: not an http(s) URL")
        secure = (tls or ssl.create_default_context()) if url.scheme == "https" else None
        port = url.port or (443 if secure else 80)
        self.endpoint = endpoint
        self.prefix = url.path.rstrip("/").encode("ascii")
        self.timeouts = timeouts
        self.clock = clock
        self.health = Health(rules)
        self.client = HttpClient(url.hostname, port, tls=secure, connect_timeout=timeouts.connect)
        # Its own connections: a probe must not wait for, or be counted with, the traffic.
        self.watcher = HttpClient(url.hostname, port, tls=secure, connect_timeout=timeouts.connect, max_idle=4)
        self.in_flight = 0
        self.rest_until = float("-inf")

    def take(self) -> Lease:
        """Count a call in, before anything is awaited."""
        self.in_flight += 1
        return Lease(self, self.health.begin(self.clock()))

    def close(self) -> None:
        """Close all connections."""
        self.client.close()
        self.watcher.close()


class Lease:
    """A call's hold on a seat; `end` counts it out exactly once, tells health how it went and frees the socket."""

    def __init__(self, seat: Seat, trial: int) -> None:
        self.seat = seat
        self._trial = trial
        self._over = False
        self._answer: Answer | None = None
        self._relay: Relay | None = None
        self._error: UpstreamFailed | EngineError | None = None
        self._patience: float | None = None

    async def open(self, order: Order) -> Relay:
        """Send the call and wait until the answer's status is certain; whatever comes of it, `end` it."""
        self._patience = order.patience
        try:
            relay = await self._opened(order)
        except (UpstreamFailed, EngineError) as error:
            self._error = error
            raise
        self._relay = relay
        if relay.good and self._trial:
            # A first token is enough to trust an endpoint again; a long stream must not hold up all others.
            self.seat.health.succeeded(self.seat.clock(), self._trial)
            self._trial = 0
        return relay

    async def _opened(self, order: Order) -> Relay:
        seat = self.seat
        outgoing = order.outgoing
        if seat.prefix:
            outgoing = replace(outgoing, target=seat.prefix + outgoing.target)
        sent_at = seat.clock()
        answer = self._answer = await seat.client.send(outgoing, first=order.patience)
        answer.gap = seat.timeouts.gap
        relay = Relay(
            answer,
            stream=order.stream,
            hide_usage=order.hide_usage,
            clock=seat.clock,
            on_progress=seat.health.progress,
        )
        relay.sent_at = sent_at
        relay.endpoint = seat.endpoint.name
        await relay.open()
        return relay

    def end(self) -> None:
        """Give the endpoint back. Idempotent, and never awaits: nothing can interrupt it."""
        if self._over:
            return
        self._over = True
        self.seat.in_flight -= 1
        if self._answer is not None:
            self._answer.close()
        self._tell(self.seat.clock())

    def _tell(self, now: float) -> None:
        health, relay, error = self.seat.health, self._relay, self._error
        failure = error if isinstance(error, UpstreamFailed) else relay.failure if relay is not None else None
        verdict = error.verdict if isinstance(error, EngineError) else relay.verdict if relay else Verdict.FINE
        if failure is not None and not self._impatient(failure):
            health.failed(now, failure.kind, self._trial)
        elif verdict is Verdict.DRAINING:
            health.draining(now, self._trial)
        elif verdict.bad:
            health.failed(now, FailureKind.ENGINE, self._trial)
        elif failure is None and relay is not None and relay.finished and verdict is Verdict.FINE:
            health.succeeded(now, self._trial)
        else:
            health.neutral(now, self._trial)
        if verdict is Verdict.BUSY and relay is not None:
            self.seat.rest_until = now + (rest_time(relay.headers) or 0.0)

    def _impatient(self, failure: UpstreamFailed) -> bool:
        """Did only this caller's own, shorter patience run out? That says nothing of the engine."""
        usual = self.seat.timeouts.first_token
        if failure.kind is not FailureKind.TIMEOUT_FIRST or self._patience is None:
            return False
        return usual is None or self._patience < usual
