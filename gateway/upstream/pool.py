"""One tier's endpoints: pick one now, hold it to the last byte, try one other before the first byte, watch all."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from gateway.core.health import FailureKind, HealthRules, State
from gateway.core.picker import Candidate, pick
from gateway.core.refusal import Reason, Refusal, Refused
from gateway.core.retry import RetryBudget
from gateway.core.types import Endpoint, EndpointLoad
from gateway.upstream.client import Outgoing, UpstreamFailed
from gateway.upstream.relay import EngineError, Relay
from gateway.upstream.scrape import STALE_AFTER, Scraper
from gateway.upstream.seat import Clock, Order, Seat, Timeouts
from gateway.upstream.watch import Watch

__all__ = ["EngineError", "Outgoing", "Pool", "Relay", "Timeouts", "UpstreamFailed"]

# Nothing was delivered and no other engine can be at work on it any more. Never after a timeout: that engine may be.
_ELSEWHERE = frozenset((FailureKind.CONNECT, FailureKind.STALE, FailureKind.CUT))


class Pool:
    """Endpoints of one pool. All times in seconds of `clock`; `dice` gives numbers in [0, 1).

    `per_endpoint_limit` steers the choice between endpoints only: how many calls the pool takes is decided
    before, by admission, and a call that was admitted is sent. `attempts` counts the first one too.
    """

    def __init__(
        self,
        name: str,
        endpoints: Sequence[Endpoint],
        *,
        clock: Clock,
        dice: Callable[[], float],
        per_endpoint_limit: int | None = None,
        timeouts: Timeouts | None = None,
        rules: HealthRules | None = None,
        attempts: int = 2,
        budget: RetryBudget | None = None,
        interval: float = 1.0,
        watch_headers: tuple[tuple[bytes, bytes], ...] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.name = name
        self.retries = 0
        self._clock = clock
        self._dice = dice
        self._limit = per_endpoint_limit
        self._timeouts = timeouts or Timeouts()
        self._attempts = attempts
        self._budget = budget or RetryBudget()
        self._seats = [Seat(endpoint, self._timeouts, rules or HealthRules(), clock, tls) for endpoint in endpoints]
        self._scrapers = [self._scraper(seat, interval, watch_headers) for seat in self._seats]
        self._watches = [
            Watch(f"watch {name}/{seat.endpoint.name}", scraper.run, interval)
            for seat, scraper in zip(self._seats, self._scrapers, strict=True)
        ]

    # -- calls --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def opened(
        self, outgoing: Outgoing, *, stream: bool, hide_usage: bool, first_timeout: float | None
    ) -> AsyncIterator[Relay]:
        """An open answer to `outgoing`; the endpoint is held until the block is left, however it is left.

        `first_timeout`: seconds from the write to the first data event, without a stream to the first byte of
        the body and so to nearly all of it; None is no limit. Raises Refused(NO_ENDPOINT), UpstreamFailed or
        EngineError, the last two with `endpoint` and `attempts`. A non-2xx answer of the last endpoint tried
        is no exception: see `Relay.status`.
        """
        order = Order(outgoing, stream, hide_usage, first_timeout)
        seat = self._pick(frozenset())
        if seat is None:
            raise Refused(self._nobody())
        lease = seat.take()
        self._budget.earn(self._clock())
        tried = {seat.endpoint.name}
        try:
            while True:
                result: Relay | UpstreamFailed | EngineError
                try:
                    result = await lease.open(order)
                except (UpstreamFailed, EngineError) as error:
                    result = error
                other = self._elsewhere(result, tried)
                if other is None:
                    break
                lease.end()
                lease = other.take()
                tried.add(other.endpoint.name)
            result.endpoint, result.attempts = lease.seat.endpoint.name, len(tried)
            if not isinstance(result, Relay):
                raise result
            yield result
        finally:
            lease.end()

    def _pick(self, tried: frozenset[str] | set[str]) -> Seat | None:
        now = self._clock()
        usable = [seat for seat in self._usable(now) if seat.endpoint.name not in tried]
        awake = [seat for seat in usable if seat.rest_until <= now]
        # An endpoint that asked for a rest is better than none at all, but no place for a second attempt.
        seats = awake if awake or tried else usable
        chosen = pick([self._candidate(seat, now) for seat in seats], self._dice(), over=True)
        return next((seat for seat in seats if seat.endpoint is chosen), None)

    def _usable(self, now: float) -> list[Seat]:
        """Who would take a call; if nobody would, who would as the last endpoint there is."""
        sure = [seat for seat in self._seats if seat.health.available(now)]
        return sure or [seat for seat in self._seats if seat.health.available(now, last=True)]

    def _candidate(self, seat: Seat, now: float) -> Candidate:
        return Candidate(seat.endpoint, seat.in_flight, self._limit, self._fresh(seat, now))

    def _elsewhere(self, result: Relay | UpstreamFailed | EngineError, tried: set[str]) -> Seat | None:
        """The endpoint for another attempt; None if this result stands."""
        if isinstance(result, Relay):
            wanted = result.verdict.elsewhere and not result.good
        elif isinstance(result, EngineError):
            wanted = result.retryable
        else:
            wanted = result.kind in _ELSEWHERE
        if not wanted or len(tried) >= self._attempts:
            return None
        other = self._pick(tried)
        # Where the first endpoint was never reached the second attempt adds no load: it costs nothing.
        free = isinstance(result, UpstreamFailed) and result.kind is FailureKind.CONNECT
        if other is None or not (free or self._budget.spend(self._clock())):
            return None
        self.retries += 1
        return other

    def _nobody(self) -> Refusal:
        wait = min((seat.health.until for seat in self._seats), default=0.0) - self._clock()
        message = f"no endpoint of pool {self.name} is available"
        return Refusal(Reason.NO_ENDPOINT, message, retry_after=max(1.0, wait))

    # -- watching -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to scrape and probe."""
        for watch in self._watches:
            watch.start()

    async def stop(self) -> None:
        """Stop watching and close every connection; open answers break off."""
        for watch in self._watches:
            await watch.stop()
        for seat in self._seats:
            seat.close()

    def available(self) -> int:
        """How many endpoints would take a call now."""
        return len(self._usable(self._clock()))

    @property
    def reachable(self) -> dict[str, bool]:
        """Whether each endpoint answers, as far as calls and probes tell."""
        return {seat.endpoint.name: seat.health.reachable for seat in self._seats}

    @property
    def window(self) -> int | None:
        """Smallest context window an endpoint reported (max_model_len, tokens); None if none did."""
        return min((s.window for s in self._scrapers if s.window is not None), default=None)

    @property
    def loads(self) -> dict[str, EndpointLoad | None]:
        """Last good load of each endpoint, of whatever age (`at`)."""
        now = self._clock()
        return {
            seat.endpoint.name: scraper.load(now) for seat, scraper in zip(self._seats, self._scrapers, strict=True)
        }

    @property
    def in_flight(self) -> dict[str, int]:
        """Calls each endpoint holds now, by the gateway's own count."""
        return {seat.endpoint.name: seat.in_flight for seat in self._seats}

    @property
    def states(self) -> dict[str, State]:
        """Health of each endpoint."""
        return {seat.endpoint.name: seat.health.state for seat in self._seats}

    @property
    def changes(self) -> int:
        """How often endpoints changed state since the start."""
        return sum(seat.health.changes for seat in self._seats)

    @property
    def replays(self) -> int:
        """Requests sent again because a kept connection was closed (metric reason stale_connection)."""
        return sum(seat.client.replays for seat in self._seats)

    def engine_waiting(self, now: float) -> float:
        """Calls that wait inside the engines, by scrapes of the last 3 s; unknown counts as none."""
        fresh = [self._fresh(seat, now) for seat in self._seats]
        return sum(load.waiting for load in fresh if load is not None and load.waiting is not None)

    def _fresh(self, seat: Seat, now: float) -> EndpointLoad | None:
        load = self._scrapers[self._seats.index(seat)].load(now)
        return load if load is not None and now - load.at <= STALE_AFTER else None

    def _scraper(self, seat: Seat, interval: float, headers: tuple[tuple[bytes, bytes], ...]) -> Scraper:
        def probed(ok: bool) -> None:
            now = self._clock()
            others = any(s is not seat and s.health.available(now) for s in self._seats)
            seat.health.probed(now, ok, last=not others)

        return Scraper(seat.watcher, self._clock, probed=probed, prefix=seat.prefix, headers=headers, interval=interval)
