"""Watch one endpoint: its metrics, its model window and whether it answers, each second, in bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from gateway.core.types import EndpointLoad
from gateway.upstream.account import decoded
from gateway.upstream.client import HttpClient, Outgoing, UpstreamFailed
from gateway.upstream.exposition import LARGEST_EXPOSITION, parse_exposition

STALE_AFTER = 3.0
_SHARE_OF_INTERVAL = 1.5


@dataclass(frozen=True, slots=True)
class Paths:
    """Where an engine tells what; relative to the endpoint's URL."""

    metrics: bytes = b"/metrics"
    models: bytes = b"/v1/models"
    health: bytes = b"/health"


class Scraper:
    """Knows the last good load of an endpoint and tells `probed` each time whether the endpoint answered.

    `interval`, `models_every`: seconds between looks. A look takes less than two intervals. Nothing here
    can stop traffic: what cannot be read is unknown (None).
    """

    def __init__(
        self,
        client: HttpClient,
        clock: Callable[[], float],
        *,
        probed: Callable[[bool], None],
        prefix: bytes = b"",
        headers: tuple[tuple[bytes, bytes], ...] = (),
        interval: float = 1.0,
        models_every: float = 30.0,
        paths: Paths = Paths(),
    ) -> None:
        self._client = client
        self._clock = clock
        self._probed = probed
        self._prefix = prefix
        self._headers = headers
        self._interval = interval
        self._models_every = models_every
        self._paths = paths
        self._models_due = float("-inf")
        self._seen_at: dict[str, float] = {}
        self._last: EndpointLoad | None = None
        self.window: int | None = None
        self.scrapes = 0
        self.failures = 0

    def load(self, now: float) -> EndpointLoad | None:
        """Last good load, whatever its age (see `at`); single values that have not been heard for 3 s are None."""
        if self._last is None:
            return None
        old: dict[str, Any] = {name: None for name, at in self._seen_at.items() if self._last.at - at > STALE_AFTER}
        return replace(self._last, **old) if old else self._last

    async def run(self) -> None:
        """Look for ever; ends only by cancellation."""
        while True:
            began = self._clock()
            await self.look()
            await asyncio.sleep(max(0.0, self._interval - (self._clock() - began)))

    async def look(self) -> None:
        """One round: health, metrics and, when due, models, at the same time; never raises for the engine's sake."""
        async with asyncio.TaskGroup() as jobs:
            jobs.create_task(self._probe())
            jobs.create_task(self._scrape())
            if self._clock() >= self._models_due:
                jobs.create_task(self._read_models())

    async def _probe(self) -> None:
        answer = await self._get(self._paths.health, 64 * 1024)
        # Engines without this path answer 404: they answer.
        self._probed(answer is not None and answer[0] < 500)

    async def _scrape(self) -> None:
        answer = await self._get(self._paths.metrics, LARGEST_EXPOSITION)
        self.scrapes += 1
        if answer is None or answer[0] != 200 or not self._learn(answer[1]):
            self.failures += 1

    def _learn(self, body: bytes) -> bool:
        now = self._clock()
        load = parse_exposition(body, now)
        heard = {f.name: value for f in fields(load) if f.name != "at" and (value := getattr(load, f.name)) is not None}
        if not heard:
            return False
        self._seen_at.update(dict.fromkeys(heard, now))
        self._last = replace(self._last, at=now, **heard) if self._last is not None else load
        return True

    async def _read_models(self) -> None:
        answer = await self._get(self._paths.models, LARGEST_EXPOSITION)
        if answer is None or answer[0] != 200:
            return
        self._models_due = self._clock() + self._models_every
        rows = (decoded(answer[1]) or {}).get("data")
        windows = [row.get("max_model_len") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        self.window = min((w for w in windows if isinstance(w, int) and w > 0), default=None)

    async def _get(self, path: bytes, largest: int) -> tuple[int, bytes] | None:
        """(status, body), None if there is no whole answer of at most `largest` bytes in time."""
        try:
            async with asyncio.timeout(self._interval * _SHARE_OF_INTERVAL):
                return await self._fetch(path, largest)
        except (UpstreamFailed, TimeoutError):
            return None

    async def _fetch(self, path: bytes, largest: int) -> tuple[int, bytes] | None:
        answer = await self._client.send(Outgoing(b"GET", self._prefix + path, self._headers))
        try:
            body = bytearray()
            while data := await answer.read():
                body += data
                if len(body) > largest:
                    return None
            return answer.status, bytes(body)
        finally:
            answer.close()
