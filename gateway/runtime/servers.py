"""uvicorn inside the gateway: two ports on one event loop, started and ended by the gateway and not by signals."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import uvicorn

from gateway.runtime.protocol import ClientConfig, ClientHttp

_BACKLOG = 2048
_KEEP_ALIVE = 75  # s; longer than the load balancers in front (60 s), so that they close first
_CLOSING = 2  # s for the last answers to leave once everything is over


class ListenError(OSError):
    """A port that cannot be had; the message names the configuration key and the fix."""


def listener(host: str, port: int, key: str) -> socket.socket:
    """A listening socket; port 0 lets the system choose. Raises ListenError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ListenError(f"cannot listen on {host}:{port} ({error.strerror}); choose another with '{key}'") from error
    # Accepted sockets inherit it; asyncio itself would not set it, as create_server leaves the protocol number 0.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


class EmbeddedServer(uvicorn.Server):
    """A uvicorn server that leaves signals to the gateway; `slow` as in ClientConfig."""

    def __init__(self, app: Any, slow: float | None) -> None:
        config = ClientConfig(
            app,
            http=ClientHttp,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_CLOSING,
        )
        config.slow = slow
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are the gateway's business."""
        yield
