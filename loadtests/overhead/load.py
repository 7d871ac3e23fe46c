"""A load generator cheap enough not to be the bottleneck: prebuilt requests, raw connections, answers only counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import cast

from loadtests.client import Target
from loadtests.overhead.source import MARK

_END = b"\r\n0\r\n\r\n"  # of a body in chunks
_LENGTH, _CHUNKED = b"\r\ncontent-length:", b"\r\ntransfer-encoding:"
_MOST_OPEN = 256  # connections of the steady load to one server


@dataclass(slots=True)
class Counts:
    """What came so far: heads with status 200, whole answers, content events, and what was not a whole 200."""

    begun: int = 0
    answers: int = 0
    events: int = 0
    failed: int = 0


class Connection(asyncio.Protocol):
    """One connection, one call at a time; `over` is told when an answer is whole (and good), or has failed."""

    def __init__(self, counts: Counts, over: Callable[[Connection, bool], None]) -> None:
        self._counts = counts
        self._over = over
        self._transport: asyncio.Transport | None = None
        self._asking = False
        self._head = b""
        self._in_body = self._good = False
        self._left: int | None = 0  # bytes to come; None: in chunks
        self._tail = b""
        self.sent_at = 0.0

    def ask(self, sent: bytes) -> None:
        """Write a request; only when none is under way."""
        assert self._transport is not None
        self._asking, self._in_body, self._head, self._tail = True, False, b"", b""
        self.sent_at = perf_counter()
        self._transport.write(sent)

    def abort(self) -> None:
        """Close at once; what was under way is not counted."""
        self._asking = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """A call under way has failed."""
        self._finish(False)

    def data_received(self, data: bytes) -> None:
        """Count, and see whether that was the end."""
        if not self._asking:
            return
        if not self._in_body:
            data = self._head + data
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                self._head = data
                return
            self._begin(data[: end - 2])
            data = data[end:]
        self._counts.events += data.count(MARK)
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._finish(self._good)
            return
        self._tail = data[-7:] if len(data) >= 7 else (self._tail + data)[-7:]
        if self._tail == _END or data == _END[2:]:
            self._finish(self._good)

    def _begin(self, head: bytes) -> None:
        self._in_body = True
        self._good = head[9:12] == b"200"
        self._counts.begun += self._good
        low = head.lower()
        at = low.find(_LENGTH)
        if at >= 0:
            self._left = int(low[at + len(_LENGTH) : low.index(b"\r\n", at + 2)])
        elif _CHUNKED in low:
            self._left = None
        else:
            self._left = 0  # an answer that ends with its connection is none that can be measured
            self._good = False

    def _finish(self, good: bool) -> None:
        if not self._asking:
            return
        self._asking = False
        if good:
            self._counts.answers += 1
        else:
            self._counts.failed += 1
        self._over(self, good)


class Callers:
    """`number` connections that ask at the same time, and (`again`) once more as soon as they have their answer.

    An async context manager; `counts` is what came so far. A connection whose call failed rests.
    """

    def __init__(self, server: Target, sent: bytes, number: int, *, again: bool) -> None:
        self._server, self._sent, self._number, self._again = server, sent, number, again
        self._connections: list[Connection] = []
        self._open = number
        self._none_left = asyncio.Event()
        self.counts = Counts()

    async def __aenter__(self) -> Callers:
        loop = asyncio.get_running_loop()
        try:
            for _ in range(self._number):
                _, connection = await loop.create_connection(
                    lambda: Connection(self.counts, self._ended), self._server.host, self._server.port
                )
                self._connections.append(connection)
        except OSError:
            self._abort()
            raise
        for connection in self._connections:
            connection.ask(self._sent)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._abort()

    async def finished(self, within: float) -> bool:
        """Whether every caller came to its end within so many seconds; only without `again`."""
        try:
            await asyncio.wait_for(self._none_left.wait(), within)
        except TimeoutError:
            return False
        return True

    def _ended(self, connection: Connection, good: bool) -> None:
        if good and self._again:
            connection.ask(self._sent)
            return
        self._open -= 1
        if not self._open:
            self._none_left.set()

    def _abort(self) -> None:
        for connection in self._connections:
            connection.abort()


class Steady:
    """Calls to one server that leave on a schedule, answered or not; `times` are those of good answers, s from sent.

    An async context manager.
    """

    def __init__(self, server: Target, sent: bytes) -> None:
        self._server, self._sent = server, sent
        self._free: list[Connection] = []
        self._all: list[Connection] = []
        self._opening: set[asyncio.Task[None]] = set()
        self.counts = Counts()
        self.times: list[float] = []
        self.unsent = 0

    async def __aenter__(self) -> Steady:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in self._all:
            connection.abort()

    def call(self) -> None:
        """Send one now, on a connection that is free or on a new one."""
        if self._free:
            self._free.pop().ask(self._sent)
        elif len(self._all) + len(self._opening) >= _MOST_OPEN:
            self.unsent += 1
        else:
            task = asyncio.get_running_loop().create_task(self._on_new())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _on_new(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(self.counts, self._ended), self._server.host, self._server.port
            )
        except OSError:
            self.counts.failed += 1
            return
        self._all.append(connection)
        connection.ask(self._sent)

    def _ended(self, connection: Connection, good: bool) -> None:
        if good:
            self.times.append(perf_counter() - connection.sent_at)
            self._free.append(connection)
        else:
            connection.abort()


async def steadily(loads: Sequence[Steady], rate: float, seconds: float) -> None:
    """Each of `loads` calls `rate` times a second, in turns and at equal gaps, so that all see the same machine."""
    loop = asyncio.get_running_loop()
    gap, begun = 1.0 / (rate * len(loads)), loop.time()
    for number in range(round(rate * seconds) * len(loads)):
        await asyncio.sleep(begun + number * gap - loop.time())
        loads[number % len(loads)].call()
