from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from gateway.sim.profile import load_profile
from gateway.sim.server import SimServer
from tests.sim.client import Client, Connect, Start


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start simulated engines: `fast`, model tiny-7b, window 2048, unless told otherwise."""
    servers: list[SimServer] = []

    async def started(seed: int = 0, **changes: Any) -> tuple[SimServer, int]:
        server = SimServer(replace(load_profile("fast"), **{"max_model_len": 2048, **changes}), "tiny-7b", seed=seed)
        port = await server.start()
        servers.append(server)
        return server, port

    yield started
    for server in servers:
        await server.stop()


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Open connections that are closed when the test is over, however it ends."""
    clients: list[Client] = []

    async def connected(port: int) -> Client:
        clients.append(await Client.connect(port))
        return clients[-1]

    yield connected
    for client in clients:
        await client.close()
