"""A tiny scripted HTTP server: each request is handed to a script that writes whatever bytes it likes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from loadtests.client import Target

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"transfer-encoding: chunked\r\nx-tiergate-tier: small\r\n\r\n"
)
EVENTS = (b'data: {"role":1}\n\n', b'data: {"t":"a"}\n\n', b'data: {"t":"b"}\n\n')
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"

Script = Callable[[int, bytes, asyncio.StreamWriter], Awaitable[None]]  # number of the request, head, where to write


class Server:
    """Listens on a free port; `script` answers. `received` counts requests, `gone` clients that left."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._writers: set[asyncio.StreamWriter] = set()
        self.received = self.connections = self.gone = 0
        self.target = Target("127.0.0.1", 0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.target.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        self.target = Target("127.0.0.1", self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                self.received += 1
                await self._script(self.received, head, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone += 1
        finally:
            self._writers.discard(writer)
            writer.close()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(status: str, body: bytes, *headers: str) -> bytes:
    lines = "".join(f"{line}\r\n" for line in headers)
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{lines}\r\n".encode() + body


def refusal(code: str = "past_knee", *headers: str) -> bytes:
    return whole("503 Service Unavailable", b"{}", f"x-tiergate-reason: {code}", *headers)


STREAM = HEAD + b"".join(chunk(event) for event in (*EVENTS, DONE)) + END


async def stream(number: int, head: bytes, writer: asyncio.StreamWriter) -> None:
    """Answer with three events."""
    writer.write(STREAM)


async def until(holds: Callable[[], bool], within: float = 5.0) -> None:
    """Wait for a state that no event announces."""
    async with asyncio.timeout(within):
        while not holds():  # noqa: ASYNC110 (the far end of a socket announces nothing)
            await asyncio.sleep(0.002)
