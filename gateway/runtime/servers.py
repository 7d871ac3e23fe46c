"""uvicorn inside the gateway: two ports on one event loop, started and ended by the gateway and not by signals."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.api.faces.asgi import ABORT

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


class AbortableHttp(HttpToolsProtocol):
    """uvicorn's HTTP protocol, telling the application how to cut a connection that nobody reads."""

    def on_message_begin(self) -> None:
        """A request begins: its scope gets the extension."""
        super().on_message_begin()
        extensions: dict[Any, Any] = self.scope.setdefault("extensions", {})
        extensions[ABORT] = self._abort

    def _abort(self) -> None:
        # Told before the loop gets round to it: uvicorn would log an answer that ends here as a fault of ours.
        self.cycle.disconnected = True
        self.transport.abort()


class EmbeddedServer(uvicorn.Server):
    """A uvicorn server that leaves signals to the gateway."""

    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=AbortableHttp,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=_CLOSING,
            )
        )

        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are the gateway's business."""
        yield
