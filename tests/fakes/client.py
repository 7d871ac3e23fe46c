"""A raw HTTP/1.1 client: every byte out is the test's own, and an answer is taken as it came."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

DEADLINE = 10.0
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass
class Response:
    """`headers` have lower-case names."""

    status: int
    headers: dict[str, str]
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, its OpenAI shape checked."""
        value = self.json()
        assert set(value) == {"error"}, value
        error: dict[str, Any] = value["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        return error

    def events(self) -> list[str]:
        """The payloads of an event stream, the framing checked."""
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == "", "the stream ends inside an event"
        return [part.removeprefix("data: ") for part in parts if not part.startswith(":")]

    @property
    def done(self) -> bool:
        """Did the stream end with [DONE]?"""
        return self.events()[-1] == "[DONE]"

    def text(self) -> str:
        """All that a chat stream said."""
        values = [json.loads(event) for event in self.events() if event != "[DONE]"]
        return "".join(each["choices"][0]["delta"].get("content") or "" for each in values if each.get("choices"))


@dataclass
class Client:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, raw: bytes) -> None:
        self.writer.write(raw)

    def post(self, body: object, path: str = CHAT, key: str | None = "key-acme", **headers: str) -> None:
        """`body` as JSON, or as it is if it is bytes; underscores of header names become dashes."""
        self.send(request("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), key, **headers))

    async def head(self) -> Response:
        """Status line and headers of the next answer."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = [line.split(":", 1) for line in lines[1:] if line]
        return Response(int(lines[0].split(" ")[1]), {name.lower(): value.strip() for name, value in pairs})

    async def piece(self) -> bytes:
        """The next chunk of a chunked body; b"" at its proper end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        data = await self.reader.readexactly(size)
        assert await self.reader.readexactly(2) == b"\r\n"
        return data

    async def pieces(self) -> bytes:
        """What is left of a chunked body, up to its proper end."""
        async with asyncio.timeout(DEADLINE):
            parts = []
            while part := await self.piece():
                parts.append(part)
        return b"".join(parts)

    async def rest(self, response: Response) -> Response:
        """The body that follows `response`."""
        if "content-length" in response.headers:
            assert "transfer-encoding" not in response.headers
            response.body = await self.reader.readexactly(int(response.headers["content-length"]))
        else:
            response.body = await self.pieces()
        return response

    async def response(self) -> Response:
        """A whole answer, in time."""
        async with asyncio.timeout(DEADLINE):
            return await self.rest(await self.head())

    def reset(self) -> None:
        """Leave with a RST, as a killed client does when bytes are on their way to it."""
        sock: socket.socket = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    """A connection that is closed at the end, however it comes."""
    client = Client(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 24))
    try:
        yield client
    finally:
        await client.close()


def request(method: str, path: str, body: bytes = b"", key: str | None = None, **headers: str) -> bytes:
    """The bytes of a request; a header given as "" is left out."""
    lines = {"host": "gateway"}
    if body or method == "POST":
        lines |= {"content-type": "application/json", "content-length": str(len(body))}
    if key is not None:
        lines["authorization"] = f"Bearer {key}"
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


async def exchange(port: int, raw: bytes) -> Response:
    """Bytes out on a connection of their own, one answer back."""
    async with connected(port) as client:
        client.send(raw)
        return await client.response()


async def post(port: int, body: object, path: str = CHAT, key: str | None = "key-acme", **headers: str) -> Response:
    async with connected(port) as client:
        client.post(body, path, key, **headers)
        return await client.response()


async def get(port: int, path: str, key: str | None = None, **headers: str) -> Response:
    return await exchange(port, request("GET", path, b"", key, **headers))


def chat(content: Any = "Hello, who are you?", **fields: Any) -> dict[str, Any]:
    """The body of a small chat call; "..." as a value leaves a field out."""
    body = {"model": "small", "messages": [{"role": "user", "content": content}], **fields}
    return {name: value for name, value in body.items() if value is not ...}


async def eventually(holds: Callable[[], Awaitable[bool]], within: float = DEADLINE) -> None:
    """Ask until the answer is yes; AssertionError after `within` seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within
    while not await holds():
        assert loop.time() < end, "did not happen in time"
        await asyncio.sleep(0.005)
