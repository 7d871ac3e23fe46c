"""What a real vLLM 0.32.0 was asked and answered on /v1/chat/completions and /v1/completions, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

# NAME.req.http and NAME.resp.http: bytes as they went over the socket; nothing in an answer that never came.
RECORDED = Path(__file__).parent / "fixtures" / "vllm_0_32.zip"


@dataclass(frozen=True, slots=True)
class Recording:
    """One exchange; `request` and `answer` are raw bytes, `answer` with its chunk framing."""

    name: str
    request: bytes
    answer: bytes

    @property
    def path(self) -> str:
        return self.request.split(b" ", 2)[1].decode()

    @property
    def asked(self) -> dict[str, Any]:
        """The body of the request; empty where it is no JSON object."""
        try:
            value = json.loads(self.request.partition(b"\r\n\r\n")[2])
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def status(self) -> int:
        return int(self.answer.split(b" ", 2)[1])

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer, names in lower case."""
        lines = self.answer.partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}

    @property
    def body(self) -> bytes:
        """The answer's body without its chunk framing, as far as it came."""
        framed = self.answer.partition(b"\r\n\r\n")[2]
        return b"".join(_chunks(framed)) if "transfer-encoding" in self.headers else framed

    @property
    def blocks(self) -> list[bytes]:
        """The body of a stream in its events and comments, each with its blank line."""
        parts = self.body.split(b"\n\n")
        assert parts.pop() == b"", "the recording ends inside an event"
        return [part + b"\n\n" for part in parts]

    @property
    def usage(self) -> dict[str, Any] | None:
        """The last usage that the answer reports."""
        told = [value["usage"] for value in map(_payload, self._documents()) if value.get("usage")]
        return told[-1] if told else None

    def _documents(self) -> list[bytes]:
        return self.blocks if self.headers["content-type"].startswith("text/event-stream") else [self.body]


def recordings() -> dict[str, Recording]:
    """All of them, by name."""
    with ZipFile(RECORDED) as kept:
        names = sorted(name.removesuffix(".req.http") for name in kept.namelist() if name.endswith(".req.http"))
        return {name: Recording(name, kept.read(f"{name}.req.http"), kept.read(f"{name}.resp.http")) for name in names}


def usage_only(block: bytes) -> bool:
    """Is this the extra event of a stream that tells usage and nothing else?"""
    value = _payload(block)
    return value.get("choices") == [] and bool(value.get("usage"))


def _payload(block: bytes) -> dict[str, Any]:
    text = block.removeprefix(b"data: ").strip()
    if not text.startswith(b"{"):
        return {}
    value: dict[str, Any] = json.loads(text)
    return value


def _chunks(framed: bytes) -> Iterator[bytes]:
    while framed:
        size, _, framed = framed.partition(b"\r\n")
        yield framed[: int(size, 16)]
        framed = framed[int(size, 16) + 2 :]
