"""One engine answer on its way to the client: committed late, passed byte for byte, and accounted for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from gateway.core.health import FailureKind
from gateway.core.types import Usage
from gateway.upstream.account import decoded, error_in, error_status, usage_in
from gateway.upstream.coding import inflater_for
from gateway.upstream.sse import EventTooLarge, Scanner
from gateway.upstream.verdict import Verdict, judge
from gateway.upstream.wire import UpstreamFailed

LARGEST_BODY = 64 * 1024 * 1024
LARGEST_LEAD = 64 * 1024  # of comments before the first event
_EWMA_SHARE = 0.2
_LAST_BYTES = 0.1  # s from `[DONE]` to the end of its framing, which most engines write separately


class Source(Protocol):
    """An answer to relay (see client.Answer)."""

    status: int
    headers: list[tuple[bytes, bytes]]
    gap: float | None

    @property
    def clean_end(self) -> bool:
        """Was the end framed?"""

    def alive(self) -> None:
        """Start the next gap."""

    def piece(self) -> None:
        """Start the next gap, within the limit on the whole answer."""

    async def read(self) -> bytes:
        """Body bytes; b"" at the end."""


class EngineError(Exception):
    """The engine answered a stream with an error before anything else.

    `status` is the HTTP status it stands for, `body` what the engine sent and `kind` its content-type, `retryable`
    whether another endpoint may do better; `endpoint` and `attempts` are filled in by the pool.
    """

    def __init__(
        self,
        status: int,
        body: bytes,
        retryable: bool,
        verdict: Verdict = Verdict.FAULT,
        kind: bytes = b"application/json",
    ) -> None:
        super().__init__(f"engine error {status}")
        self.status = status
        self.body = body
        self.kind = kind
        self.retryable = retryable
        self.verdict = verdict
        self.endpoint = ""
        self.attempts = 0


class Relay:
    """`open` it, then `read` until b"". `clock` gives seconds; `on_progress` hears of every batch of events.

    `sent_at` is when the request went out (set by the pool), `first_token_at` the clock reading at the first
    data event (None without a stream), `failure` the UpstreamFailed that ended it, `gap` a moving mean of the
    seconds between events. Times include waiting for a client that does not read.
    """

    def __init__(
        self,
        answer: Source,
        *,
        stream: bool,
        hide_usage: bool,
        clock: Callable[[], float],
        on_progress: Callable[[float], None] | None = None,
        largest: int = LARGEST_BODY,
    ) -> None:
        self._answer = answer
        self._clock = clock
        self._on_progress = on_progress
        self._largest = largest
        self._inflater = inflater_for(answer.headers)
        self._scanner = Scanner(hide_usage=hide_usage, largest=largest)
        self._ready: list[bytes] = []
        self._ready_size = 0
        self._ended = False
        self._whole_usage: Usage | None = None
        self._whole_failed = False
        self._last_at = 0.0
        self._error_status = 500
        self.status = answer.status
        self.headers = [h for h in answer.headers if self._inflater is None or h[0] != b"content-encoding"]
        self.streaming = stream and self.good and self._may_be_events()
        self.body = b""
        self.failure: UpstreamFailed | None = None
        self.verdict = Verdict.FINE
        self.first_token_at: float | None = None
        self.gap: float | None = None
        self.sent_at = clock()
        self.endpoint = ""
        self.attempts = 1

    # -- account ------------------------------------------------------------------------------------------------

    @property
    def good(self) -> bool:
        """Is the status a 2xx?"""
        return 200 <= self.status < 300

    @property
    def usage(self) -> Usage | None:
        """Tokens the engine reported last; None if it has not."""
        return self._scanner.usage if self.streaming else self._whole_usage

    @property
    def events(self) -> int:
        """Data events so far, without `[DONE]`."""
        return self._scanner.events

    @property
    def finished(self) -> bool:
        """Did the engine say that the answer is whole?"""
        return self._scanner.finished if self.streaming else self._ended and self.good

    @property
    def failed(self) -> bool:
        """Did the engine report an error inside its answer? (It was passed on as it is.)"""
        return self._scanner.failed if self.streaming else self._whole_failed

    @property
    def inter_token(self) -> float | None:
        """Mean seconds between tokens after the first: by reported tokens, else by events; None below two."""
        tokens = self.usage.completion if self.usage is not None and self.usage.completion > 1 else self.events
        if self.first_token_at is None or tokens < 2:
            return None
        return (self._last_at - self.first_token_at) / (tokens - 1)

    # -- the answer ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Wait until the status is certain: the first data event of a stream, or all of any other answer.

        Raises EngineError if a stream begins with an error, UpstreamFailed if it does not begin at all.
        An answer that is not 2xx is left in `status`, `headers` and `body`.
        """
        try:
            await (self._open_stream() if self.streaming else self._open_whole())
        except UpstreamFailed as failure:
            self.failure = failure
            raise

    async def read(self) -> bytes:
        """The next bytes for the client, whole events of a stream; b"" at the end.

        Raises UpstreamFailed if the answer breaks off: also a stream that ends politely without having finished.
        """
        while not self._ready:
            if self.failure is not None:
                raise self.failure
            if self._ended:
                return b""
            await (self._close() if self._scanner.closed else self._pump())
        return self._taken()

    def _taken(self) -> bytes:
        data = b"".join(self._ready)
        self._ready.clear()
        self._ready_size = 0
        return data

    async def _open_stream(self) -> None:
        while not (self._scanner.events or self._scanner.done or self._ended):
            await self._pump()
            if not self._scanner.events and self._ready_size > LARGEST_LEAD:
                self._taken()  # comments carry nothing, and nobody waits for older ones
        if self.failure is not None and not self._scanner.events:
            raise self.failure
        if self._scanner.error is not None:
            retryable = self.verdict is not Verdict.CLIENT
            raise EngineError(self._error_status, self._scanner.error, retryable, self.verdict)

    async def _open_whole(self) -> None:
        parts: list[bytes] = []
        size = 0
        while data := await self._more():
            self._answer.piece()
            parts.append(data)
            size += len(data)
            if size > self._largest:
                raise UpstreamFailed(FailureKind.PROTOCOL, "an answer that is too large")
        self.body = b"".join(parts)
        self._ended = True
        self.verdict, self.status = judge(self.status, self.body)
        if self.good:
            self._account_whole()
        if self.body:
            self._ready.append(self.body)

    def _account_whole(self) -> None:
        value = decoded(self.body)
        if value is not None:
            self._whole_usage = usage_in(value)
            self._whole_failed = error_in(value)
        elif self._is_json() and not self._answer.clean_end:
            raise UpstreamFailed(FailureKind.CUT, "half a JSON document")
        else:
            raise UpstreamFailed(FailureKind.PROTOCOL, "an answer that is no JSON object")

    async def _pump(self) -> None:
        """One step of a stream: bytes in, whole events to `_ready`; a failure is kept for when those are read."""
        try:
            raw = await self._more()
            kept = self._take(raw) if raw else self._end()
        except UpstreamFailed as failure:
            # The client has its `[DONE]` or the engine's own error: how the connection ends adds nothing.
            if not (self._scanner.done or self._scanner.failed):
                self.failure = failure
            self._ended = True
            return
        if kept:
            self._ready.append(kept)
            self._ready_size += len(kept)

    async def _close(self) -> None:
        """The client has its `[DONE]`: take what ends the framing, so that the connection can carry another call."""
        self._answer.gap = _LAST_BYTES
        self._answer.alive()
        with suppress(UpstreamFailed):
            await self._answer.read()
        self._ended = True

    def _take(self, raw: bytes) -> bytes:
        before, was_done = self._scanner.events, self._scanner.done
        try:
            kept = self._scanner.feed(raw)
        except EventTooLarge as error:
            raise UpstreamFailed(FailureKind.PROTOCOL, "an event that is too large") from error
        if self._scanner.error is not None and self.verdict is Verdict.FINE:
            told = error_status(decoded(self._scanner.error) or {})
            self.verdict, self._error_status = judge(told, self._scanner.error)
        if self._scanner.events > before:
            self._tokens(self._scanner.events - before, was_done)
        return kept

    def _tokens(self, count: int, was_done: bool) -> None:
        # Comments, and what follows the final event, prove nothing: only data of the answer starts the next gap.
        if not was_done:
            self._answer.alive()
        now = self._clock()
        if self.first_token_at is None:
            self.first_token_at = now
        else:
            gap = (now - self._last_at) / count
            self.gap = gap if self.gap is None else self.gap + _EWMA_SHARE * (gap - self.gap)
        self._last_at = now
        if self._on_progress is not None and not self._scanner.failed:
            self._on_progress(now)

    def _end(self) -> bytes:
        rest = self._scanner.finish()
        if not (self._scanner.finished or self._scanner.failed):
            raise UpstreamFailed(FailureKind.CUT, "the stream ended without a finish reason")
        self._ended = True
        return rest

    async def _more(self) -> bytes:
        while raw := await self._answer.read():
            plain = raw if self._inflater is None else self._inflater.feed(raw)
            if plain:
                return plain
        if self._inflater is not None and not self._inflater.ended:
            raise UpstreamFailed(FailureKind.CUT, "a compressed answer broke off")
        return b""

    def _is_json(self) -> bool:
        return content_type(self.headers).startswith(b"application/json")

    def _may_be_events(self) -> bool:
        kind = content_type(self.headers)
        return kind.startswith(b"text/event-stream") or (not kind and self.status == 200)


def content_type(headers: list[tuple[bytes, bytes]]) -> bytes:
    """The content-type among `headers`, in lower case; b"" if there is none."""
    return next((value.strip().lower() for name, value in headers if name == b"content-type"), b"")
