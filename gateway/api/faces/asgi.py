"""The ASGI face: one exchange on any ASGI server, with a client that leaves noticed at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from gateway.api.errors import error_event
from gateway.api.openai import Door
from gateway.core.refusal import Reason, Refusal, Refused
from gateway.pipeline.ports import Header, Quotas

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

ABORT = "tiergate.abort"  # scope extension: cuts the connection at once


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Bounds on a client: body in bytes; `slow` seconds for the body to come and a write to be taken (None: any)."""

    body: int = 8 * 1024 * 1024
    slow: float | None = 30.0


class AsgiCalls:
    """The plain ASGI endpoint of the `/v1` calls; knows who is under way, so that a drain can end them."""

    def __init__(self, door: Door, limits: ClientLimits, draining: Callable[[], bool]) -> None:
        self._door = door
        self._limits = limits
        self._draining = draining
        self.under_way: set[AsgiExchange] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange = AsgiExchange(scope, receive, send, self._limits, self._draining())
        self.under_way.add(exchange)
        try:
            await self._door.answer(exchange)
        except asyncio.CancelledError:
            if exchange.ended_by is None:
                raise
        finally:
            self.under_way.discard(exchange)
            exchange.close()

    async def until_idle(self, seconds: float) -> None:
        """Return when nobody is under way any more, or after `seconds`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self.under_way and (left := deadline - loop.time()) > 0:
            await asyncio.wait([exchange.task for exchange in self.under_way], timeout=left)

    def end_all(self, reason: Reason) -> None:
        """End every call that is under way (the drain's time is over)."""
        for exchange in tuple(self.under_way):
            exchange.stop(reason)


class AsgiExchange:
    """One request and its reply. A watcher waits for the client to leave, from the last body byte to the end."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: ClientLimits, closing: bool) -> None:
        self.path: str = scope["path"]
        self.headers: Mapping[bytes, bytes] = dict(scope["headers"])
        self.account: Quotas | None = None
        self.started = False
        self.ended_by: Reason | None = None
        self.decided: Callable[[], list[Header]] = list
        self._abort: Callable[[], None] | None = scope.get("extensions", {}).get(ABORT)
        self._receive = receive
        self._send = send
        self._limits = limits
        self._closing = closing
        self._loop = asyncio.get_running_loop()
        self.task = _current_task()
        self._watcher: asyncio.Task[None] | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._writing_since: float | None = None

    async def body(self) -> bytes:
        """The request body; raises Refused(body_too_large, body_timeout, client_gone)."""
        length = self.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limits.body:
            raise _too_large(self._limits.body)
        try:
            async with asyncio.timeout(self._limits.slow):
                body = await self._read()
        except TimeoutError:
            self._closing = True
            message = "The request body did not arrive in time. Send it without pauses."
            raise Refused(Refusal(Reason.BODY_TIMEOUT, message)) from None
        self._watcher = self._loop.create_task(self._watch())
        return body

    async def start(self, status: int, headers: list[Header], length: int | None) -> None:
        """Status and headers, with what was decided about the call."""
        self.started = True
        headers = [*headers, *self.decided()]
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        if self._closing:
            headers.append((b"connection", b"close"))
        if self._limits.slow is not None:
            self._stall = self._loop.call_later(self._limits.slow, self._check_stall)
        await self._sent({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Body bytes; waits while the client does not take them."""
        await self._sent({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """The answer is complete."""
        await self._sent({"type": "http.response.body", "body": b"", "more_body": False})

    async def break_off(self, reason: Reason, message: str) -> None:
        """An error event, then a properly closed stream without [DONE]."""
        await self.write(error_event(reason, message))
        await self.end()

    def stop(self, reason: Reason) -> None:
        """Cancel the call, wherever it is; only the first reason counts."""
        if self.ended_by is None:
            self.ended_by = reason
            self.task.cancel()

    def close(self) -> None:
        """Give the watcher and the timer back; cut the connection of a client that does not read."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._stall is not None:
            self._stall.cancel()
        if self.ended_by is not None:
            self.task.uncancel()
        if self.ended_by is Reason.CLIENT_STALLED and self._abort is not None:
            self._abort()

    async def _read(self) -> bytes:
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Refused(Refusal(Reason.CLIENT_GONE, "The client left."))
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > self._limits.body:
                raise _too_large(self._limits.body)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.stop(Reason.CLIENT_GONE)

    async def _sent(self, message: MutableMapping[str, Any]) -> None:
        self._writing_since = self._loop.time()
        await self._send(message)
        self._writing_since = None

    def _check_stall(self) -> None:
        slow = self._limits.slow or 0.0
        since = self._writing_since
        if since is not None and self._loop.time() - since >= slow:
            self.stop(Reason.CLIENT_STALLED)
        else:
            self._stall = self._loop.call_later(slow / 4, self._check_stall)


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("an exchange lives in the task that serves it")
    return task


def _too_large(bound: int) -> Refused:
    return Refused(Refusal(Reason.BODY_TOO_LARGE, f"The request body is larger than the {bound:,} bytes allowed."))
