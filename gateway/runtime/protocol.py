"""HTTP/1.1 as clients speak it: uvicorn's protocol, with bounds on what a connection may send and how long it may take.

It leans on these internals of uvicorn (hence the narrow pin): `cycle` is the newest request, `pipeline` holds those
that wait for their turn (newest left), `_start_asgi_task` begins one, `on_response_complete` ends one; a cycle reads
`disconnected`, `message_event`, `more_body`, `keep_alive`, `waiting_for_100_continue`, `chunked_encoding` and
`expected_content_length`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.api.errors import error_body, retry_headers
from gateway.api.faces.asgi import ABORT, Receive, Scope, Send
from gateway.core.refusal import Reason, Refusal, Refused

_HEAD = 64 * 1024  # bytes of a request line with its headers
_QUEUED = 8  # requests behind the one that is served
_QUEUED_BODIES = 1024 * 1024  # bytes of theirs
_PARTING = 30.0  # s for a client to take its last answer, where nothing else bounds it
_LEAST = 1.0  # s; a head needs a moment, however little time a body is given

_LARGE_HEAD = Refusal(Reason.MALFORMED, f"The request line and headers are larger than the {_HEAD:,} bytes allowed.")
_LATE = Refusal(Reason.BODY_TIMEOUT, "The request did not arrive in time. Send it without pauses.")
_TUNNEL = Refusal(Reason.MALFORMED, "This is no proxy: CONNECT is not served.")
_CROWD = Refusal(Reason.MALFORMED, "Too much was sent ahead of the answers. Wait for each answer.")


class ClientConfig(uvicorn.Config):
    """uvicorn's settings and `slow`: seconds for a head to arrive and for a last answer to be taken (None: any)."""

    slow: float | None = None


class ClientHttp(HttpToolsProtocol):
    """One connection of a client.

    A fault of the client ends the connection in order. Where other requests are under way, they are answered; where
    none is, the fault is. Then our side closes, and what still comes is dropped until the client closes or its time is
    over: closing at once would reset the connection under a client that is still sending, and lose it the answer.
    """

    def __init__(self, config: ClientConfig, *args: Any, **named: Any) -> None:
        super().__init__(config, *args, **named)
        self._slow = None if config.slow is None else max(config.slow, _LEAST)
        self._running: RequestResponseCycle | None = None
        self._deaf = False  # nothing more is taken from this connection
        self._in_head = False
        self._unusable = 0  # bytes since the last that a request could use: a head so far, trailers, chunk extensions
        self._deadline: asyncio.TimerHandle | None = None
        self._untaken: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is here and should ask for something."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: tell the call that is served; those behind it are never begun."""
        self._disarm()
        self.resume_writing()
        if self._running is not None:
            _gone(self._running)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server ends: close now, or after the answer under way."""
        # uvicorn's own looks at the newest request only, which may be one that waits.
        if self._running is None:
            self.transport.close()
        else:
            self._running.keep_alive = False

    def timeout_keep_alive_handler(self) -> None:
        """Nothing was asked for long: the connection goes, even if the client never took its last answer."""
        self.transport.abort()

    def pause_writing(self) -> None:
        """The client takes nothing: it may for a while."""
        super().pause_writing()
        if self._slow is not None:
            # Calls have a bound of their own, `slow`, and an ending with its own name: theirs comes first.
            self._untaken = self.loop.call_later(2 * self._slow, self.transport.abort)

    def resume_writing(self) -> None:
        """The client takes its answers again."""
        super().resume_writing()
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None

    def data_received(self, data: bytes) -> None:
        """Bytes of the client; a fault in them is answered in OpenAI's shape."""
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        self._unusable += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            cause = error.__context__  # what one of the methods below raised
            self._refuse(cause.refusal if isinstance(cause, Refused) else _malformed(error))
            return
        if self._unusable > _HEAD:
            self._refuse(_LARGE_HEAD)
        elif self._running is None:
            self._await_head()

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                # The parser takes what follows for another protocol. A server may ignore the wish to upgrade (RFC 9110,
                # 7.8), and Java's HttpClient wishes for h2c each time: the head is told again without it.
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
            else:
                return

    def _head_without_upgrade(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [method + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    # Callbacks of the parser; what they raise comes out of feed_data as the context of an HttpParserError.

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A request begins, or stands in line."""
        self._in_head, self._unusable = False, 0
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > _HEAD:
            raise Refused(_LARGE_HEAD)
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise Refused(_TUNNEL)
            return
        super().on_headers_complete()
        self._bound_queue()

    def on_body(self, body: bytes) -> None:
        """Bytes of a request's body."""
        self._unusable = 0
        super().on_body(body)
        self._bound_queue()

    def on_message_complete(self) -> None:
        """The last byte of a request."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _bound_queue(self) -> None:
        if not self.pipeline:
            return
        if len(self.pipeline) > _QUEUED or sum(len(cycle.body) for cycle, _ in self.pipeline) > _QUEUED_BODIES:
            raise Refused(_CROWD)
        # uvicorn stops reading here, and then would not see the client leave while the call before is served.
        self.flow.resume_reading()

    # The calls, one after another.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._disarm()
        extensions: dict[Any, Any] = cycle.scope.setdefault("extensions", {})
        extensions[ABORT] = partial(self._abort, cycle)
        super()._start_asgi_task(cycle, partial(self._serve, cycle, app))

    async def _serve(self, cycle: RequestResponseCycle, app: Any, scope: Scope, receive: Receive, send: Send) -> None:
        unframed = False

        async def framed(message: Any) -> None:
            nonlocal unframed
            if message["type"] != "http.response.start":
                if unframed:
                    cycle.expected_content_length = len(message.get("body", b""))
                await send(message)
                return
            headers = [header for header in message.get("headers", ()) if header[0] != b"connection"]
            if scope["http_version"] == "1.0" and all(name != b"content-length" for name, _ in headers):
                # HTTP/1.0 knows no chunks: the body ends where the connection does.
                unframed, cycle.chunked_encoding = True, False
            if not self._is_last(cycle):
                await send(message)
                return
            self._deaf = True
            await send({**message, "headers": [*headers, (b"connection", b"close")]})
            cycle.keep_alive = True  # not uvicorn's to close: on_response_complete parts from the client

        await app(scope, receive, framed)

    def _is_last(self, cycle: RequestResponseCycle) -> bool:
        """Whether nothing can follow the answer of `cycle`: a fault did, or the request itself is not over."""
        return cycle.more_body or (self._deaf and not self.pipeline)

    def on_response_complete(self) -> None:
        """An answer is complete: the next request in line begins, or the connection ends or waits for more."""
        self._running = None
        one_more = bool(self.pipeline)
        super().on_response_complete()
        if self.transport.is_closing():
            self._arm(self._slow, self.transport.abort)  # closing waits for the client to take what is left
        elif one_more:
            return
        elif self._deaf:
            self._part()
        elif self._in_head:
            self._unset_keepalive_if_required()
            self._await_head()

    def _refuse(self, refusal: Refusal) -> None:
        self._deaf = True
        self.flow.resume_reading()  # to see the client leave
        if self.pipeline:
            if self.cycle.more_body:
                self.pipeline.popleft()
            return
        running = self._running
        if running is not None:
            if not running.more_body:
                return
            self._running = None
            _gone(running)
        self.transport.write(_answer(refusal, self.server_state.default_headers))
        self._part()

    def _part(self) -> None:
        self._unset_keepalive_if_required()
        self.transport.write_eof()
        self._arm(_PARTING if self._slow is None else self._slow, self.transport.abort)

    def _abort(self, cycle: RequestResponseCycle) -> None:
        if cycle is self._running:
            # Told before the loop gets round to it: uvicorn would log an answer that ends here as a fault of ours.
            _gone(cycle)
            self.transport.abort()

    # Time.

    def _await_head(self) -> None:
        if self._deadline is None:
            self._arm(self._slow, self._too_slow)

    def _too_slow(self) -> None:
        if self._in_head:
            self._refuse(_LATE)
        else:
            self.transport.abort()

    def _arm(self, seconds: float | None, then: Callable[[], None]) -> None:
        self._disarm()
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, then)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _gone(cycle: RequestResponseCycle) -> None:
    """Tell a call that its client is gone."""
    cycle.disconnected = True
    cycle.waiting_for_100_continue = False
    cycle.message_event.set()


def _malformed(error: httptools.HttpParserError) -> Refusal:
    ours = isinstance(error, httptools.HttpParserCallbackError)  # its text names our methods, not the client's fault
    return Refusal(Reason.MALFORMED, "This is no valid HTTP/1.1 request" + ("." if ours else f": {error}."))


def _answer(refusal: Refusal, dated: list[tuple[bytes, bytes]]) -> bytes:
    body = error_body(refusal.reason, refusal.message)
    headers = [
        *dated,
        *retry_headers(refusal, 0.0),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    return STATUS_LINE[refusal.reason.status] + lines + b"\r\n" + body
