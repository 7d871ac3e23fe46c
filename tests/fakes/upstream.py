"""A scripted engine on a raw TCP socket: whole freedom over bytes, timing and the way a connection ends."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

DEADLINE = 5.0


@dataclass(frozen=True, slots=True)
class Received:
    """A request as it came in; `headers` have lower-case names, the last of equal names wins."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    head: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Peer:
    """One accepted connection, as the script sees it; `requests` is what was read from it."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.requests: list[Received] = []
        self.gone = asyncio.Event()
        self.gone_at: float | None = None
        self._reader = reader
        self._writer = writer

    async def request(self) -> Received | None:
        """The next request, whole; None when the client closed the connection instead."""
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            received = _parsed(head)
            body = await self._reader.readexactly(int(received.headers.get("content-length", "0")))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._left()
            return None
        received = Received(received.method, received.target, received.headers, body, head)
        self.requests.append(received)
        return received

    async def send(self, data: bytes) -> None:
        """Send now; waits while the client does not read. ConnectionError when it left."""
        self._writer.write(data)
        await self._writer.drain()

    async def send_bytewise(self, data: bytes) -> None:
        """Send one byte per packet, as far as the kernel lets us say so."""
        for at in range(len(data)):
            await self.send(data[at : at + 1])
            await asyncio.sleep(0)

    async def client_left(self) -> None:
        """Wait until the client closes its side (bytes that it still sends are dropped)."""
        try:
            while await self._reader.read(65536):
                pass
        except ConnectionError:
            pass
        self._left()

    def close(self) -> None:
        """Close politely (FIN)."""
        self._writer.close()

    def reset(self) -> None:
        """Close with a RST; what the client has not read yet may be lost."""
        sock: socket.socket = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def _left(self) -> None:
        if not self.gone.is_set():
            self.gone_at = asyncio.get_running_loop().time()
            self.gone.set()


Script = Callable[[Peer], Awaitable[None]]


@dataclass
class FakeUpstream:
    """`async with FakeUpstream(script) as engine:`; the script runs once a connection, then the connection closes.

    `script` may be replaced at any time, for the connections to come. A script's own error is raised at the end.
    """

    script: Script
    peers: list[Peer] = field(default_factory=list)
    port: int = 0
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _errors: list[BaseException] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def requests(self) -> list[Received]:
        """All requests of all connections, connection by connection."""
        return [request for peer in self.peers for request in peer.requests]

    @property
    def open(self) -> int:
        """Connections that the script has not finished with."""
        return len(self._tasks)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=1 << 26)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        for task in [*self._tasks]:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._errors and error is None:
            raise self._errors[0]

    def stop_listening(self) -> None:
        """Refuse new connections from now on; open ones go on."""
        if self._server is not None:
            self._server.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = Peer(len(self.peers), reader, writer)
        self.peers.append(peer)
        task = asyncio.get_running_loop().create_task(self._play(peer, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _play(self, peer: Peer, writer: asyncio.StreamWriter) -> None:
        try:
            await self.script(peer)
        except ConnectionError:
            peer._left()
        except (AssertionError, LookupError, ValueError, TypeError) as error:
            self._errors.append(error)
        finally:
            writer.transport.abort() if writer.is_closing() else writer.close()


# -- scripts ------------------------------------------------------------------------------------------------------


def answers(*responses: bytes) -> Script:
    """Each request, on whichever connection, gets the next of `responses`; the last one for ever after."""
    left = _then_last(responses)

    async def script(peer: Peer) -> None:
        while await peer.request() is not None:
            await peer.send(next(left))

    return script


def by_path(routes: dict[str, bytes], default: bytes) -> Script:
    """The response of the request's path."""

    async def script(peer: Peer) -> None:
        while (request := await peer.request()) is not None:
            await peer.send(routes.get(request.target, default))

    return script


async def silent(peer: Peer) -> None:
    """Read one request, answer nothing, wait for the client to leave."""
    await peer.request()
    await peer.client_left()


def _then_last(responses: tuple[bytes, ...]) -> Iterator[bytes]:
    yield from responses
    while True:
        yield responses[-1]


# -- bytes --------------------------------------------------------------------------------------------------------


def response(body: bytes = b"", status: int = 200, kind: str = "application/json", extra: str = "") -> bytes:
    """A response with a content-length; `extra` holds header lines, each ended by CRLF."""
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{extra}\r\n"
    return head.encode() + body


def json_response(value: Any, status: int = 200, extra: str = "") -> bytes:
    return response(json.dumps(value).encode(), status, extra=extra)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    """One data event; bytes go in as they are."""
    text = value if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return b"data: " + text + b"\n\n"


def stream_response(events: Iterable[bytes]) -> bytes:
    """A whole chunked SSE response, an event a chunk."""
    return STREAM_HEAD + b"".join(chunk(data) for data in events) + LAST_CHUNK


def chat_events(*words: str, usage: tuple[int, int] | None = None, finish: str = "stop") -> list[bytes]:
    """A chat stream as vLLM sends it: role, words, finish, usage if asked for, [DONE]."""
    deltas: list[tuple[dict[str, str], str | None]] = [({"role": "assistant", "content": ""}, None)]
    deltas += [({"content": word}, None) for word in words[:-1]]
    deltas.append(({"content": words[-1] if words else ""}, finish))
    events = [event({"id": "c1", "choices": [{"index": 0, "delta": d, "finish_reason": f}]}) for d, f in deltas]
    if usage is not None:
        counts = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
        events.append(event({"id": "c1", "choices": [], "usage": counts}))
    return [*events, event(b"[DONE]")]


class RefusedPort:
    """A port that refuses connections for as long as it is held: bound, but nobody listens."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()


async def until(condition: Callable[[], bool], within: float = DEADLINE) -> None:
    """Let the loop turn until `condition` holds; AssertionError after `within` seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within
    while not condition():
        assert loop.time() < end, "did not happen in time"
        await asyncio.sleep(0.002)


def _parsed(head: bytes) -> Received:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    headers = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
    return Received(method, target, headers, b"", head)
