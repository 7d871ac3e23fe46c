"""The life of a gateway: start, serve, drain, end."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from types import MappingProxyType

from prometheus_client import CollectorRegistry

from gateway.api.app import ApiPort, api_app
from gateway.api.auth import Keyring
from gateway.api.faces.asgi import AsgiCalls, ClientLimits
from gateway.api.openai import Door
from gateway.api.ops import ops_app
from gateway.config.schema import Config
from gateway.core.refusal import Reason, Refusal
from gateway.core.types import Record, Tenant
from gateway.core.views import Snapshot
from gateway.runtime.notyet import warned
from gateway.runtime.parts import build
from gateway.runtime.servers import EmbeddedServer, ListenError, listener
from gateway.runtime.views import pool_view
from gateway.telemetry.log import CallLog
from gateway.telemetry.metrics import Metrics

_TEND = 1.0  # s between looks at what the engines say
_CLOSING = 5.0  # s for the servers to close their connections
_FAREWELL = 1.0  # s for the calls ended by a drain to tell their clients


class Gateway:
    """One gateway process. `api` and `ops` are the ports in use once it has started."""

    def __init__(self, config: Config, log: CallLog) -> None:
        self._config = config
        self._log = log
        # Seeded by the system once: neither jitter nor request ids are secrets, and each draw from it is a system call.
        chance = random.Random(secrets.token_bytes(32))
        clock, dice = time.monotonic, chance.random
        self._clock = clock
        self._parts = build(config, clock, dice)
        keyring = Keyring(self._parts.keys)
        self._metrics = Metrics(CollectorRegistry())
        self._metrics.watch(self.snapshot)

        def fresh_id() -> str:
            return f"{chance.getrandbits(96):024x}"

        door = Door(lambda: keyring, self._parts.pipeline, self._ended, clock, dice, fresh_id)
        slow = config.timeouts.body
        limits = ClientLimits(config.caps.body, slow)
        self._calls = AsgiCalls(door, limits, lambda: self.draining)
        admin = frozenset(config.admin.keys)
        self._servers = (
            EmbeddedServer(ApiPort(self._calls, api_app(self._calls, self, lambda: keyring)), slow),
            EmbeddedServer(ops_app(self._metrics.render, self.snapshot, admin), slow),
        )
        self.draining = False
        self.api = self.ops = 0
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> bool:
        """Whether new calls should be sent here: not draining, and at least one engine reachable."""
        return not self.draining and any(any(lane.upstream.reachable.values()) for lane in self._parts.lanes.values())

    def models(self, tenant: Tenant) -> dict[str, int | None]:
        """Model names `tenant` may ask for, with their context windows where known."""
        windows = {name: lane.window or lane.upstream.window for name, lane in self._parts.lanes.items()}
        by_tier = {pool.tier: windows[name] for name, pool in reversed(self._config.pools.items())}
        return {name: by_tier.get(name) for name in self._parts.policy.tiers.models(tenant)}

    def snapshot(self) -> Snapshot:
        """The whole gateway now, for metrics and operators."""
        now = self._clock()
        views = (pool_view(self._config.pools[name], lane, now) for name, lane in self._parts.lanes.items())
        return Snapshot(tuple(views), self._parts.quota.views(), draining=self.draining)

    async def start(self, settings: Mapping[str, str] = MappingProxyType({})) -> None:
        """Listen on both ports and begin to watch the engines. Raises ListenError.

        `settings` are other names for the keys `listen.api` and `listen.ops`, for its message.
        """
        listen = self._config.listen
        api = listener(listen.api.host, listen.api.port, settings.get("listen.api", "listen.api"))
        try:
            ops = listener(listen.ops.host, listen.ops.port, settings.get("listen.ops", "listen.ops"))
        except ListenError:
            api.close()
            raise
        self.api, self.ops = api.getsockname()[1], ops.getsockname()[1]
        for lane in self._parts.lanes.values():
            await lane.upstream.start()
        for server, socket in zip(self._servers, (api, ops), strict=True):
            self._serving.append(self._spawn(server.serve([socket])))
            await server.up.wait()
        self._spawn(self._tend())
        self._log.event("started", api=self.api, ops=self.ops, warnings=[*self._config.warnings, *warned(self._config)])

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain; a second one ends the process at once."""
        loop = asyncio.get_running_loop()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, self._signalled)
        await self._over.wait()

    async def drain(self) -> None:
        """Refuse newcomers, let everybody inside finish, end who is not done in time, stop."""
        rules = self._config.drain
        self.draining = True
        self._log.event("draining", delay=rules.delay, timeout=rules.timeout)
        await asyncio.sleep(rules.delay)
        gone = Refusal(Reason.DRAINING, "This gateway is shutting down; another one will answer.", retry_after=1.0)
        lanes = self._parts.lanes.values()
        for lane in lanes:
            lane.dispatcher.close(gone)
        await self._calls.until_idle(rules.timeout)
        for lane in lanes:
            lane.dispatcher.evict_all(gone)
        self._calls.end_all(Reason.DRAINING)
        await self._calls.until_idle(_FAREWELL)
        await self.stop()

    async def stop(self) -> None:
        """Stop at once: servers, watchers, connections."""
        for server in self._servers:
            server.should_exit = True
        for lane in self._parts.lanes.values():
            await lane.upstream.stop()
        await asyncio.wait(self._serving, timeout=_CLOSING)
        self._log.event("stopped")
        self._over.set()
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    async def _tend(self) -> None:
        """Once a second: what the engines report waiting, and whether limits changed."""
        while True:
            for lane in self._parts.lanes.values():
                lane.dispatcher.admission.engine_waiting = int(lane.upstream.engine_waiting(self._clock()))
                lane.dispatcher.pump()
            await asyncio.sleep(_TEND)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logging.getLogger("tiergate").error("a task of the gateway died", exc_info=error)

    def _signalled(self) -> None:
        if self.draining:
            self._log.close(0.5)
            os._exit(1)
        self._spawn(self.drain())

    def _ended(self, record: Record) -> None:
        self._metrics.ended(record)
        self._log.write(record)


def open_log(config: Config) -> CallLog:
    """The call log that `config` asks for. Raises OSError if its file cannot be written."""
    if config.log.file is None and sys.stdout is not None:
        return CallLog(sys.stdout)
    # A process started with its standard output closed has no such stream. The file is open as long as the process.
    return CallLog(Path(config.log.file or os.devnull).open("a", encoding="utf-8"))
