"""A raw HTTP/1.1 client for the tests of the simulated engine: bytes out, bytes in."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from gateway.sim.server import SimServer


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[str]:
        """The payloads of an event stream, the framing checked."""
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == "", "the stream ends inside an event"
        assert all(part.startswith("data: ") for part in parts), parts
        return [part.removeprefix("data: ") for part in parts]

    def chunks(self) -> list[Any]:
        """The JSON of all events but the last, which must be [DONE]."""
        *events, last = self.events()
        assert last == "[DONE]"
        return [json.loads(event) for event in events]


@dataclass
class Client:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def connect(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def post(self, path: str, body: object, **headers: str) -> None:
        payload = json.dumps(body).encode()
        lines = {"host": "sim", "content-type": "application/json", "content-length": str(len(payload)), **headers}
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
        self.writer.write(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + payload)

    async def head(self) -> Response:
        """Status line and headers of the next answer."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = [line.split(": ", 1) for line in lines[1:] if line]
        return Response(int(lines[0].split(" ")[1]), {name: value for name, value in pairs})

    async def pieces(self) -> AsyncIterator[bytes]:
        """The chunks of a chunked body, up to its proper end."""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
        assert await self.reader.readexactly(2) == b"\r\n"

    async def response(self) -> Response:
        """A whole answer."""
        response = await self.head()
        if "content-length" in response.headers:
            response.body = await self.reader.readexactly(int(response.headers["content-length"]))
        else:
            response.body = b"".join([piece async for piece in self.pieces()])
        return response

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


async def send(port: int, raw: bytes) -> Response:
    """One exchange of raw bytes on a connection of its own."""
    client = await Client.connect(port)
    try:
        client.writer.write(raw)
        return await asyncio.wait_for(client.response(), 10)
    finally:
        await client.close()


async def post(port: int, path: str, body: object, **headers: str) -> Response:
    client = await Client.connect(port)
    try:
        client.post(path, body, **headers)
        return await asyncio.wait_for(client.response(), 10)
    finally:
        await client.close()


async def get(port: int, path: str) -> Response:
    return await send(port, f"GET {path} HTTP/1.1\r\nhost: sim\r\n\r\n".encode())


def chat(**fields: object) -> dict[str, object]:
    """The body of a small chat call."""
    return {"model": "tiny-7b", "messages": [{"role": "user", "content": "Hello, who are you?"}], **fields}


async def until(holds: Callable[[], bool], within: float = 5.0) -> None:
    """Wait for a state that no event announces."""
    async with asyncio.timeout(within):
        while not holds():  # noqa: ASYNC110 (the engine under test announces nothing)
            await asyncio.sleep(0.001)


# What the fixtures of this folder give.
Start = Callable[..., Awaitable[tuple[SimServer, int]]]
Connect = Callable[[int], Awaitable[Client]]
