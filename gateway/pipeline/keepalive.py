"""SSE comments while a stream waits for its first token, so that proxies in between do not give up on it."""

from __future__ import annotations

import asyncio
from types import TracebackType

from gateway.pipeline.ports import Header, Reply

_COMMENT = b": keepalive\n\n"
_STREAM_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
)


class Keepalive:
    """Writes a comment every `every` seconds (0: never) until it is stopped; the first one commits a 200.

    An async context manager round everything that may wait; `stop` it when the answer's own bytes begin.
    """

    __slots__ = ("_beating", "_every", "_reply", "_timer")

    def __init__(self, reply: Reply, every: float) -> None:
        self._reply = reply
        self._every = every
        self._timer: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Keepalive:
        self._arm()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """No more comments; returns when one that is under way is written: cut short, it could lose the headers."""
        self._every = 0.0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        beating, self._beating = self._beating, None
        if beating is not None:
            await asyncio.wait([beating])

    def _arm(self) -> None:
        if self._every > 0:
            self._timer = asyncio.get_running_loop().call_later(self._every, self._beat)

    def _beat(self) -> None:
        self._beating = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        if not self._reply.started:
            await self._reply.start(200, list(_STREAM_HEADERS), None)
        await self._reply.write(_COMMENT)
        self._arm()
