"""An upstream that costs next to nothing: canned answers and paced SSE streams from one raw asyncio protocol.

What a stream does is said in the prompt, which every gateway passes on: `events=300 rate=100` asks for 300 content
events at 100 a second, `rate=0` for as many as the connection takes. Each content event holds one MARK, so that a
reader can count events without looking at frames.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Sequence
from typing import cast

import uvloop

MARK = b"~"
MODEL = "bench"
CHAT = (
    b'{"id":"chatcmpl-5f1c0a9be2d84b7f","object":"chat.completion","created":1764403200,"model":"bench","choices":[{'
    b'"index":0,"message":{"role":"assistant","content":"A queue grows for as long as work arrives faster than it is '
    b"done; what bounds it is either that callers give up, or that somebody says no in time. The honest figure is the "
    b'age of the oldest call in it.","refusal":null,"tool_calls":[]},"logprobs":null,"finish_reason":"stop",'
    b'"stop_reason":null}],"service_tier":null,"usage":{"prompt_tokens":131,"total_tokens":179,"completion_tokens":48,'
    b'"prompt_tokens_details":null},"prompt_logprobs":null}'
)
MODELS = b'{"object":"list","data":[{"id":"bench","object":"model","owned_by":"vllm","max_model_len":32768}]}'
METRICS = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.1\n"
HEALTH = b'{"status":"ok"}'

_EVENT = (
    b'data: {"id":"chatcmpl-5f1c0a9be2d84b7f","object":"chat.completion.chunk","created":1764403200,"model":"bench",'
    b'"choices":[%s]%s}\n\n'
)
_CHOICE = b'{"index":0,"delta":{%s},"logprobs":null,"finish_reason":%s}'
_USAGE = b',"usage":{"prompt_tokens":131,"total_tokens":179,"completion_tokens":48}'
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_STREAM = re.compile(rb"events=(\d+) rate=(\d+)")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_SPREAD = 0.618  # of a gap by which each stream starts later than the one before: streams do not beat together


def asked(events: int, rate: int) -> str:
    """The words of a prompt that ask for a stream; `rate` in events a second, 0: as fast as it goes."""
    return f"events={events} rate={rate}"


def answer(body: bytes, content_type: bytes = b"application/json") -> bytes:
    """A whole response."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
    return head % (content_type, len(body)) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


_FIRST = _STREAM_HEAD + _chunk(_EVENT % (_CHOICE % (b'"role":"assistant","content":""', b"null"), b""))
_NEXT = _chunk(_EVENT % (_CHOICE % (b'"content":" ' + MARK + b'token"', b"null"), b""))
_LAST = (
    _chunk(_EVENT % (_CHOICE % (b"", b'"stop"'), b""))
    + _chunk(_EVENT % (b"", _USAGE))
    + _chunk(b"data: [DONE]\n\n")
    + b"0\r\n\r\n"
)
_CHAT, _MODELS, _HEALTH = answer(CHAT), answer(MODELS), answer(HEALTH)
_METRICS = answer(METRICS, b"text/plain; version=0.0.4")


class Upstream(asyncio.Protocol):
    """One connection; a request is read whole, then answered."""

    def __init__(self, phase: float) -> None:
        self._phase = phase  # 0..1, place of this connection's events between two ticks
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._left = 0  # events of the stream in progress
        self._gap = self._due = 0.0
        self._timer: asyncio.Handle | None = None
        self._paused = self._streaming = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The stream is over, too."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Answer once the request is whole."""
        self._received += data
        if whole(self._received):
            request, self._received = self._received, b""
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        assert self._transport is not None
        if not request.startswith(b"POST "):
            path = request.split(b" ", 2)[1]
            known = {b"/v1/models": _MODELS, b"/metrics": _METRICS}
            self._transport.write(known.get(path, _HEALTH))
        elif (stream := _STREAM.search(request)) is None:
            self._transport.write(_CHAT)
        else:
            self._streaming, self._left, rate = True, int(stream[1]), int(stream[2])
            self._gap = 1.0 / rate if rate else 0.0
            self._due = self._loop.time() + self._gap * self._phase
            self._transport.write(_FIRST)
            self._plan()

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()  # a write may pause us before its own next event was planned
        if self._gap:
            self._timer = self._loop.call_at(self._due, self._event)
        else:
            self._timer = self._loop.call_soon(self._event)

    def _event(self) -> None:
        if self._paused or self._transport is None:
            return  # resume_writing goes on
        if not self._left:
            self._streaming = False
            self._transport.write(_LAST)
            return
        self._transport.write(_NEXT)
        self._left -= 1
        self._due += self._gap
        self._plan()

    def pause_writing(self) -> None:
        """The reader is slow: events wait here, they are not piled up."""
        self._paused = True
        if self._timer is not None:
            self._timer.cancel()

    def resume_writing(self) -> None:
        """Go on at the pace that was asked for, without making up for what was missed."""
        self._paused = False
        if self._streaming:
            self._due = max(self._due, self._loop.time())
            self._plan()


def whole(request: bytes) -> bool:
    """Whether `request` is complete, framed by a length or in chunks."""
    end = request.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = request[: end + 2]
    if (length := _LENGTH.search(head)) is not None:
        return len(request) >= end + 4 + int(length[1])
    return not _CHUNKED.search(head) or request.endswith(b"\r\n0\r\n\r\n")


class Phases:
    """Makes the protocol of each connection, with a phase of its own."""

    def __init__(self) -> None:
        self._made = 0

    def connected(self) -> Upstream:
        """For the next connection."""
        self._made += 1
        return Upstream(self._made * _SPREAD % 1.0)


async def serve(port: int) -> None:
    """Listen on loopback (port 0: any), say where, and answer until the process is ended."""
    server = await asyncio.get_running_loop().create_server(Phases().connected, "127.0.0.1", port, backlog=2048)
    print(f"source on port {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(parser.parse_args(arguments).port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
