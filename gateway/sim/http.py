"""HTTP/1.1 for the simulated engine: one asyncio protocol a connection, one request at a time."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import cast

import httptools


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A complete request: `path` without the query, header names in lower case, the whole body."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    keep_alive: bool


Handler = Callable[[HttpRequest, "Connection"], None]


class Connection(asyncio.Protocol):
    """One client. The handler answers with `reply`, or with `open_stream`, `send` ... `end_stream`, now or later.

    Like vLLM it takes the end of the client's side for a disconnect, buffers without bound for a slow reader, and
    closes a connection that was idle for `keepalive` seconds. `on_gone` is called once if the client leaves
    before its answer is complete.
    """

    def __init__(self, handler: Handler, keepalive: float, connections: set[Connection]) -> None:
        self._handler = handler
        self._keepalive = keepalive
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[HttpRequest] = deque()
        self._answering: HttpRequest | None = None
        self._pumping = False
        self._idle_timer: asyncio.TimerHandle | None = None
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self.on_gone: Callable[[], None] | None = None
        self.closed: asyncio.Future[None] = self._loop.create_future()

    # Events of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to wait for a request."""
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._wait_idle()

    def data_received(self, data: bytes) -> None:
        """Parse; a request is handled when its last byte is in."""
        self._stop_idle()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse()
            return
        self._pump()

    def eof_received(self) -> bool:
        """The client closed its side, which is a disconnect even if it would still read."""
        if self._answering is not None:
            self.cut()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client, and tell the handler if it still owed it something."""
        self._connections.discard(self)
        self._stop_idle()
        self._queue.clear()
        gone, self.on_gone, self._answering = self.on_gone, None, None
        self.closed.set_result(None)
        if gone is not None:
            gone()

    # Events of the parser.

    def on_message_begin(self) -> None:
        """A new request."""
        self._target, self._headers, self._body = b"", {}, []

    def on_url(self, url: bytes) -> None:
        """Part of the request target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; of a repeated one the last counts."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Let a client that asked first send its body."""
        if self._headers.get("expect", "").lower() == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Part of the body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """The request is whole; it is answered after the ones before it (pipelining)."""
        method, path = self._parser.get_method().decode("ascii"), self._target.partition(b"?")[0].decode("latin-1")
        keep_alive = self._parser.should_keep_alive()
        self._queue.append(HttpRequest(method, path, self._headers, b"".join(self._body), keep_alive))

    # Answers.

    def reply(self, status: int, body: bytes, headers: str = "content-type: application/json\r\n") -> None:
        """A whole answer; `headers` are complete lines besides date, server, length and connection."""
        length = f"content-length: {len(body)}\r\n"
        self._transport.write(self._head(status, length + headers) + body)
        self._done()

    def open_stream(self) -> None:
        """The head of an event stream, status 200."""
        kind = "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
        self._transport.write(self._head(HTTPStatus.OK, kind))

    def send(self, chunks: bytes) -> None:
        """Bytes of the stream's body, already in chunked coding."""
        self._transport.write(chunks)

    def end_stream(self, chunks: bytes) -> None:
        """The last bytes of the stream; the end of the chunked coding is added."""
        self._transport.write(chunks + b"0\r\n\r\n")
        self._done()

    def cut(self, rst: bool = False, flush: bool = False) -> None:
        """Close in the middle of whatever goes on: with a reset, or after what was already written (`flush`)."""
        if rst:
            raw = self._transport.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if flush:
            self._transport.close()
        else:
            self._transport.abort()

    def _head(self, status: int, headers: str) -> bytes:
        assert self._answering is not None, "an answer without a request"
        close = "" if self._answering.keep_alive else "connection: close\r\n"
        return f"{_status_line(status)}{headers}vary: Origin\r\n{close}\r\n".encode("latin-1")

    def _done(self) -> None:
        answered, self._answering, self.on_gone = self._answering, None, None
        if answered is not None and not answered.keep_alive:
            self._queue.clear()
            self._transport.close()
            return
        self._pump()
        if self._answering is None:
            self._wait_idle()

    def _pump(self) -> None:
        # A handler that replies at once comes back here through _done; the flag makes that a loop, not a recursion.
        if self._pumping:
            return
        self._pumping = True
        while self._queue and self._answering is None:
            self._answering = self._queue.popleft()
            self._handler(self._answering, self)
        self._pumping = False

    def _refuse(self) -> None:
        if self._answering is None:
            text = b"Invalid HTTP request received."
            kind = f"content-type: text/plain; charset=utf-8\r\ncontent-length: {len(text)}\r\n"
            self._transport.write(f"{_status_line(400)}{kind}connection: close\r\n\r\n".encode() + text)
            self._transport.close()
        else:
            self.cut()

    def _wait_idle(self) -> None:
        self._stop_idle()
        self._idle_timer = self._loop.call_later(self._keepalive, self._transport.close)

    def _stop_idle(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None


def _status_line(status: int) -> str:
    date = formatdate(usegmt=True)
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ndate: {date}\r\nserver: uvicorn\r\n"
