"""Pooled HTTP/1.1 client of one endpoint: whole requests out in one write, answers read as they come."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque

from gateway.core.health import FailureKind
from gateway.upstream.connection import Connection
from gateway.upstream.wire import Outgoing, UpstreamFailed, end_to_end, request_head

__all__ = ["Answer", "FailureKind", "HttpClient", "Outgoing", "UpstreamFailed"]


class Answer:
    """A response whose head has arrived; `headers` are lower-case, without framing and hop-by-hop headers.

    The limit `first` given to `send` stays in force while reading, until `alive` is called: from then on
    `gap` seconds (None: no limit, 0: at once) may pass between two calls of `alive`. With `piece` instead
    of `alive` it stays in force to the end. Only time spent waiting
    for bytes can time out; bytes that are here are always delivered first.
    """

    def __init__(self, client: HttpClient, connection: Connection) -> None:
        self._client = client
        self._connection: Connection | None = connection
        self._ended = False
        self._framed = connection.framed
        self._whole_by = connection.deadline
        self.status = connection.status
        self.headers = end_to_end(connection.headers)
        self.gap: float | None = None

    @property
    def clean_end(self) -> bool:
        """Was the end told by the framing (a length or a last chunk), and not by the closing of the connection?"""
        return self._ended and self._framed

    def alive(self) -> None:
        """Something that counts has arrived: start the next `gap`."""
        if self._connection is not None:
            self._connection.limit(self.gap, FailureKind.TIMEOUT_GAP)

    def piece(self) -> None:
        """A part of a whole answer has arrived: the next may take `gap`, all of them no more than `first`."""
        self.alive()
        connection, end = self._connection, self._whole_by
        if connection is not None and end is not None and (connection.deadline is None or end <= connection.deadline):
            connection.deadline, connection.deadline_kind = end, FailureKind.TIMEOUT_FIRST

    async def read(self) -> bytes:
        """All body bytes that are here, waiting for some; b"" at the proper end.

        Raises UpstreamFailed (TIMEOUT_FIRST, TIMEOUT_GAP, CUT, PROTOCOL) after the last good bytes. A
        cancelled read closes the answer: an engine must not go on working for nobody.
        """
        if self._connection is None:
            if self._ended:
                return b""
            raise UpstreamFailed(FailureKind.CUT, "the answer is closed")
        try:
            data = await self._connection.read()
        except asyncio.CancelledError:
            self.close()
            raise
        self._ended = not data
        return data

    def close(self) -> None:
        """Give the connection back if all of the response was read, otherwise close it. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._ended = self._ended or connection.drained
            self._client.give_back(connection)


class HttpClient:
    """Connections to one endpoint; the newest idle one is used first, old ones are closed by a timer.

    `connect_timeout` and `idle_limit` are seconds (vLLM closes idle connections after 5). `replays` counts
    requests sent a second time because the kept connection turned out to be closed.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        connect_timeout: float = 2.0,
        idle_limit: float = 3.0,
        max_idle: int = 256,
    ) -> None:
        self._address = (host, port)
        self._tls = tls
        self._connect_timeout = connect_timeout
        self._idle_limit = idle_limit
        self._max_idle = max_idle
        name = f"[{host}]" if ":" in host else host
        self._host = f"{name}:{port}".encode("ascii")
        self._idle: deque[Connection] = deque()
        self._active: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False
        self.replays = 0

    @property
    def idle(self) -> int:
        """Connections kept for the next request."""
        return len(self._idle)

    @property
    def active(self) -> int:
        """Connections with a request on them."""
        return len(self._active)

    async def send(self, request: Outgoing, *, first: float | None = None) -> Answer:
        """Send `request`, return when the response head is here; `first` seconds from the write, None: no limit.

        Raises UpstreamFailed. A kept connection that the engine closed before any byte of a response is
        replaced by a fresh one, once; nothing else is repeated.
        """
        data = request_head(request, self._host) + request.body
        head_only = request.method == b"HEAD"
        kept = self._take_idle()
        if kept is not None:
            try:
                return await self._exchange(kept, data, head_only, first)
            except UpstreamFailed as failure:
                if failure.kind is not FailureKind.STALE:
                    raise
                self.replays += 1
        return await self._exchange(await self._connect(), data, head_only, first)

    def close(self) -> None:
        """Close every connection now; whoever still reads gets UpstreamFailed(CUT)."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in [*self._idle, *self._active]:
            connection.abort()

    def give_back(self, connection: Connection) -> None:
        """An exchange is over: keep the connection if it can carry another one."""
        self._active.discard(connection)
        if self._closed or not connection.reusable or len(self._idle) >= self._max_idle:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        connection.park(loop.time())
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(self._idle_limit, self._sweep)

    def lost(self, connection: Connection) -> None:
        """A connection is closed, whoever did it: forget it."""
        self._active.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def _connect(self) -> Connection:
        self._check_open()
        loop = asyncio.get_running_loop()
        host, port = self._address
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(lambda: Connection(self, loop), host, port, ssl=self._tls)
        except TimeoutError as error:
            raise UpstreamFailed(FailureKind.CONNECT, "connecting took too long") from error
        except (OSError, UnicodeError) as error:
            raise UpstreamFailed(FailureKind.CONNECT, type(error).__name__) from error
        self._active.add(connection)
        self._check_open()
        return connection

    def _check_open(self) -> None:
        if self._closed:
            for connection in [*self._active]:
                connection.abort()
            raise UpstreamFailed(FailureKind.CONNECT, "the client is closed")

    async def _exchange(self, connection: Connection, data: bytes, head_only: bool, first: float | None) -> Answer:
        self._active.add(connection)
        try:
            connection.start(data, head_only=head_only, first=first)
            await connection.head()
        except (UpstreamFailed, asyncio.CancelledError):
            connection.abort()
            raise
        return Answer(self, connection)

    def _take_idle(self) -> Connection | None:
        oldest = asyncio.get_running_loop().time() - self._idle_limit
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    def _sweep(self) -> None:
        self._sweeper = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._idle and now - self._idle[0].idle_since >= self._idle_limit:
            self._idle.popleft().abort()
        if self._idle:
            self._sweeper = loop.call_later(self._idle[0].idle_since + self._idle_limit - now, self._sweep)
