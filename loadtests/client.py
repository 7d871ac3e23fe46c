"""A minimal HTTP/1.1 client for load generation: connections are kept, streams are timed, nothing is retried."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from time import monotonic
from typing import cast
from urllib.parse import urlsplit

import httptools

# A kept connection that rested longer is not used again: its server may close it in the very moment of the write.
_LONGEST_REST = 2.0  # s
_MOST_BODY = 4 * 1024 * 1024  # bytes of an answer that are kept
_TAIL = 32  # bytes of a stream that are looked at again with what follows them
_EVENT, _ERROR, _DONE = b"\ndata:", b'\ndata: {"error"', b"\ndata: [DONE]\n\n"


class Ended(StrEnum):
    """How a call ended, as its client saw it; WHOLE says nothing of the status."""

    WHOLE = "whole"
    ERROR = "error"  # a stream that ended with an error event
    CUT = "cut"  # connection refused, closed early, not HTTP, or a stream without [DONE]
    HUNG = "hung"  # not over within the time limit
    UNSENT = "unsent"  # the generator had too many calls open


@dataclass(frozen=True, slots=True)
class Target:
    """A server on this machine."""

    host: str
    port: int


def target(url: str) -> Target:
    """The server of `url`; ValueError unless it is plain http on a loopback address: load is for nobody else."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError(f"{url}: must look like http://127.0.0.1:8000")
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ValueError(f"{url}: load is sent to loopback addresses only (127.0.0.1, ::1, localhost)")
    return Target(host, parts.port or 80)


def request(method: str, path: str, headers: Iterable[tuple[str, str]] = (), body: bytes = b"") -> bytes:
    """The bytes of a request."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in (("host", "loadtest"), *headers))
    return f"{method} {path} HTTP/1.1\r\n{lines}content-length: {len(body)}\r\n\r\n".encode("latin-1") + body


@dataclass(slots=True)
class Answer:
    """What came back. Times on the monotonic clock, s; `status` 0: nothing came.

    `events` counts data events without [DONE]; `first_at` is when the first of them came, without a stream the body.
    """

    status: int = 0
    ended: Ended = Ended.CUT
    reason: str = ""
    tier: str = ""
    retry_after: float | None = None
    first_at: float | None = None
    ended_at: float = 0.0
    events: int = 0
    body: bytes = b""


class Connection(asyncio.Protocol):
    """One connection, one call at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._over: asyncio.Future[None] | None = None
        self._answer = Answer()
        self._streaming = self._failed = self._done = False
        self._tail = b"\n"
        self.rests_since = 0.0
        self.usable = False

    async def ask(self, sent: bytes, answer: Answer) -> None:
        """Write `sent` and fill in `answer`; returns when that is over, however it ended."""
        assert self._transport is not None
        self._answer, self._tail = answer, b"\n"
        self._streaming = self._failed = self._done = False
        self._over = asyncio.get_running_loop().create_future()
        self._transport.write(sent)
        await self._over

    def abort(self) -> None:
        """Close at once."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready."""
        self._transport = cast(asyncio.Transport, transport)
        self.usable = True

    def connection_lost(self, exc: Exception | None) -> None:
        """A call that is not over now was cut."""
        self.usable = False
        self._finish(Ended.CUT)

    def data_received(self, data: bytes) -> None:
        """Parse."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep what the report needs."""
        answer = self._answer
        match name.lower():
            case b"content-type":
                self._streaming = value.startswith(b"text/event-stream")
            case b"x-tiergate-reason":
                answer.reason = value.decode("latin-1")
            case b"x-tiergate-tier":
                answer.tier = value.decode("latin-1")
            case b"retry-after":
                answer.retry_after = float(value) if value.isdigit() else None

    def on_headers_complete(self) -> None:
        """The status is known."""
        self._answer.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """Part of the body: count its events."""
        answer = self._answer
        if not self._streaming:
            answer.first_at = answer.first_at or monotonic()
            if len(answer.body) < _MOST_BODY:
                answer.body += data
            return
        seen = self._tail + data
        answer.events += seen.count(_EVENT) - self._tail.count(_EVENT)
        if answer.first_at is None and answer.events:
            answer.first_at = monotonic()
        self._failed = self._failed or _ERROR in seen
        self._done = seen.endswith(_DONE)
        self._tail = seen[-_TAIL:]

    def on_message_complete(self) -> None:
        """The call is over; the connection may carry another."""
        self.usable = self.usable and self._parser.should_keep_alive()
        if self._done:
            self._answer.events -= 1
        if self._failed:
            self._finish(Ended.ERROR)
        else:
            self._finish(Ended.WHOLE if self._done or not self._streaming else Ended.CUT)

    def _finish(self, ended: Ended) -> None:
        if self._over is None or self._over.done():
            return
        self._answer.ended, self._answer.ended_at = ended, monotonic()
        self._over.set_result(None)


class Client:
    """Calls to one server on connections that are kept between them; an async context manager."""

    def __init__(self, server: Target) -> None:
        self._server = server
        self._resting: list[Connection] = []
        self._busy: set[Connection] = set()
        self.opened = 0  # connections so far

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in (*self._resting, *self._busy):
            connection.abort()
        self._resting.clear()

    async def call(self, sent: bytes, limit: float) -> Answer:
        """Send a request and take its answer, HUNG after `limit` seconds; what goes wrong is in the answer."""
        answer = Answer()
        connection: Connection | None = None
        try:
            async with asyncio.timeout(limit):
                connection = self._rested() or await self._connected()
                self._busy.add(connection)
                await connection.ask(sent, answer)
        except TimeoutError:
            answer.ended = Ended.HUNG
        except OSError:
            answer.ended = Ended.CUT
        finally:
            if connection is not None:
                self._give_back(connection, whole=answer.ended is not Ended.HUNG and answer.ended_at > 0)
        answer.ended_at = answer.ended_at or monotonic()
        return answer

    def _rested(self) -> Connection | None:
        while self._resting:
            connection = self._resting.pop()
            if connection.usable and monotonic() - connection.rests_since < _LONGEST_REST:
                return connection
            connection.abort()
        return None

    async def _connected(self) -> Connection:
        self.opened += 1
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._server.host, self._server.port)
        return connection

    def _give_back(self, connection: Connection, *, whole: bool) -> None:
        """Keep the connection, or close it where its answer is not over (that also tells the server)."""
        self._busy.discard(connection)
        if whole and connection.usable:
            connection.rests_since = monotonic()
            self._resting.append(connection)
        else:
            connection.abort()
