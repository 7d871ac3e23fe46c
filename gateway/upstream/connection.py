"""One HTTP/1.1 connection to an engine, as an asyncio protocol: one exchange at a time, bytes as they come."""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

import httptools

from gateway.core.health import FailureKind
from gateway.upstream.wire import UpstreamFailed

HIGH_WATER = 64 * 1024
LONGEST_HEAD = 64 * 1024
STALE_WITHIN = 2.0
SWITCHING_PROTOCOLS = 101
BODILESS = frozenset((204, 304))


class Owner(Protocol):
    """Who keeps the connection between exchanges."""

    def lost(self, connection: Connection) -> None:
        """The socket is closed, whoever did it."""


class Connection(asyncio.Protocol):
    """Reads one response after another; every failure is kept and raised to whoever waits or reads next."""

    def __init__(self, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._busy = False
        self._closed = False
        self._started = 0.0
        self.idle_since = 0.0
        self.exchanges = 0
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.deadline: float | None = None
        self.deadline_kind = FailureKind.TIMEOUT_FIRST
        self.failure: UpstreamFailed | None = None
        self.complete = False
        self.framed = True
        self._head_done = False
        self._head_only = False
        self._keep_alive = False
        self._touched = False
        self._spoilt = False
        self._overhead = 0
        self._chunks: list[bytes] = []
        self._unread = 0

    @property
    def reusable(self) -> bool:
        """Is the exchange over, wholly read, and the connection good for another one?"""
        sound = self.complete and self.framed and self._keep_alive and not self._spoilt and not self._closed
        return sound and self.drained and self._written()

    @property
    def drained(self) -> bool:
        """Is the response over and all of it read?"""
        return self.complete and not self._chunks

    @property
    def usable(self) -> bool:
        """Can a request be written now? (False once the peer closed it or sent something unasked.)"""
        return not self._closed and self._transport is not None and not self._transport.is_closing()

    def start(self, request: bytes, *, head_only: bool, first: float | None) -> None:
        """Write a whole request; the response head must come within `first` seconds (None: no limit, 0: at once)."""
        if self._transport is None:
            raise UpstreamFailed(FailureKind.CONNECT, "not connected")
        self._reset()
        self._head_only = head_only
        self._busy = True
        self.exchanges += 1
        self._started = self._loop.time()
        if first is not None:
            self.deadline = self._started + first
        self._transport.write(request)

    def limit(self, seconds: float | None, kind: FailureKind) -> None:
        """The next byte must come within `seconds` from now (None: no limit); `kind` names the failure."""
        self.deadline = None if seconds is None else self._loop.time() + seconds
        self.deadline_kind = kind

    async def head(self) -> None:
        """Wait for the final response head; raises UpstreamFailed."""
        while not self._head_done:
            if self.failure is not None:
                raise self.failure
            await self._wait()

    async def read(self) -> bytes:
        """All body bytes there are, waiting for some; b"" at the proper end; raises UpstreamFailed."""
        while not self._chunks:
            if self.failure is not None:
                raise self.failure
            if self.complete:
                return b""
            await self._wait()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._unread = 0
        if self._paused and self._transport is not None and not self._closed:
            self._paused = False
            self._transport.resume_reading()
        return data

    def park(self, now: float) -> None:
        """Between exchanges: drop what the last one left."""
        self._busy = False
        self.idle_since = now
        self._stop_timer()
        self._reset()

    def abort(self) -> None:
        """Close the socket now, both ways; what was received and not read is dropped. Idempotent."""
        self._stop_timer()
        if self._busy and not self.complete and self.failure is None:
            self.failure = UpstreamFailed(FailureKind.CUT, "closed by the gateway")
        self._busy = False
        self._chunks.clear()
        self._wake()
        if self._transport is not None:
            self._transport.abort()
        if not self._closed:
            self._closed = True
            self._owner.lost(self)

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of a response, or a reason to close."""
        if not self._busy:
            self.abort()  # bytes nobody asked for: the next response could not be told from them
            return
        if self.failure is not None:
            return
        self._touched = True
        self._overhead += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(FailureKind.PROTOCOL, "the engine switched protocols")
        except httptools.HttpParserError as error:
            if self.complete:
                self._spoilt = True
            else:
                self._fail(FailureKind.PROTOCOL, f"not a valid response: {error}")
        if self._overhead > LONGEST_HEAD and not self.complete:
            self._fail(FailureKind.PROTOCOL, "more than 64 KiB of head or chunk framing")
        if self._unread > HIGH_WATER and not self._paused and self._transport is not None and not self._closed:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        """The engine is done sending: never keep a half-open connection."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed: decide whether that was the end of the body or a failure."""
        if self._busy and not self.complete and self.failure is None:
            self._ended_by_peer(exc)
        self._stop_timer()
        if not self._closed:
            self._closed = True
            self._owner.lost(self)
        self._wake()

    def _ended_by_peer(self, exc: Exception | None) -> None:
        how = f" ({type(exc).__name__})" if exc is not None else ""
        if not self._touched:
            # A lost keep-alive race shows at once; a later end is a crash, and the engine may have done the work.
            raced = self.exchanges > 1 and self._loop.time() - self._started <= STALE_WITHIN
            kind = FailureKind.STALE if raced else FailureKind.CUT
            self.failure = UpstreamFailed(kind, "closed before any byte of a response" + how)
        elif self._head_done and not self.framed and exc is None:
            self.complete = True
        else:
            self.failure = UpstreamFailed(FailureKind.CUT, "closed in the middle of a response" + how)

    # -- httptools callbacks ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A second response to one request is nobody's: finish the first, do not use the connection again."""
        if self.complete:
            self._spoilt = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header of the head; trailers are dropped."""
        if not self._head_done:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Head of an interim or of the final response."""
        if self._spoilt:
            return
        status = self._parser.get_status_code()
        if status == SWITCHING_PROTOCOLS:
            self._fail(FailureKind.PROTOCOL, "the engine switched protocols")
            return
        if status < 200:
            self.headers = []
            return
        self._judge_head(status)

    def _judge_head(self, status: int) -> None:
        if sum(len(name) + len(value) for name, value in self.headers) > LONGEST_HEAD:
            self._fail(FailureKind.PROTOCOL, "response head of more than 64 KiB")
            return
        coding = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if coding and coding != [b"chunked"]:
            self._fail(FailureKind.PROTOCOL, "transfer-encoding other than chunked")
            return
        self.status = status
        self._head_done = True
        self._keep_alive = self._parser.should_keep_alive()
        sized = bool(coding) or any(name == b"content-length" for name, _ in self.headers)
        self.framed = sized or status in BODILESS or self._head_only
        if self._head_only:
            # The parser cannot be told that this answer has no body, so the connection ends here.
            self.complete = self._spoilt = True

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if self._spoilt or self.failure is not None:
            return
        self._overhead = 0
        self._chunks.append(body)
        self._unread += len(body)

    def on_message_complete(self) -> None:
        """The end of a response as its framing says."""
        if self._head_done and not self._spoilt:
            self.complete = True

    # -- waiting ------------------------------------------------------------------------------------------------

    async def _wait(self) -> None:
        if self.deadline is not None:
            self._arm(self.deadline)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _arm(self, deadline: float) -> None:
        """One timer a connection: it is only moved when the new deadline is earlier, and looks again when it fires."""
        if self._timer is not None:
            if self._timer.when() <= deadline:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._waiter is None or self.deadline is None:
            return
        if self._loop.time() >= self.deadline:
            self._fail(self.deadline_kind, "no answer in time")
            self._wake()
        else:
            self._arm(self.deadline)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _written(self) -> bool:
        return self._transport is not None and self._transport.get_write_buffer_size() == 0

    def _fail(self, kind: FailureKind, detail: str) -> None:
        if self.failure is None:
            self.failure = UpstreamFailed(kind, detail)
            self._spoilt = True
        if self._transport is not None:
            self._transport.abort()
