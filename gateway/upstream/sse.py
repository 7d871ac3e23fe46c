"""Server-sent events on bytes: whole events out as they came in, and an account of what they said."""

from __future__ import annotations

import re

from gateway.core.types import Usage
from gateway.upstream.account import FINAL_TYPES, decoded, error_in, finish_in, kind_of, usage_in, usage_only

LARGEST_EVENT = 64 * 1024 * 1024
# Atomic groups: CRLF is one line end and may not be taken apart into two.
_BLANK = re.compile(rb"(?>\r\n|\r|\n)(?>\r\n?|\n)")
_LINE_END = re.compile(rb"\r\n|\r|\n")
_DONE = b"[DONE]"


class EventTooLarge(Exception):
    """An event of more than `LARGEST_EVENT` bytes."""


class Scanner:
    """Cuts a stream into events and keeps the account of one answer.

    Only CR, LF and CRLF end lines, however the bytes are split; comments and unknown fields pass. Events
    leave whole or not at all, so that a stream that breaks off can still be ended with a proper error event.
    With `hide_usage` the chunk that carries nothing but usage is left out. Nothing passes after `[DONE]`.

    Public state: `events` (events with data, without `[DONE]`), `first_at` (offset in the stream of the first
    of them), `usage` (the last one reported), `finished` (a finish reason or a final event was seen), `done`
    (`[DONE]` or the final event of the Anthropic and Responses formats), `closed` (`[DONE]` was seen: the rest
    is dropped), `error` (payload of the first error event), `failed`.
    """

    def __init__(self, *, hide_usage: bool = False, largest: int = LARGEST_EVENT) -> None:
        self._hide_usage = hide_usage
        self._largest = largest
        self._held: list[bytes] = []
        self._held_size = 0
        self._edge = b""
        self._cr: bool | None = None  # the last event ended in a CR that may be half a CRLF; was it hidden?
        self._offset = 0
        self.events = 0
        self.first_at: int | None = None
        self.usage: Usage | None = None
        self.finished = False
        self.done = False
        self.closed = False
        self.error: bytes | None = None

    @property
    def failed(self) -> bool:
        """Was an error event seen?"""
        return self.error is not None

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the stream; the events they complete, as they came (b"" for none)."""
        if self._cr is not None and data:
            hidden, self._cr = self._cr, None
            if data.startswith(b"\n"):  # the second half of the CRLF that ended the last event: it shares its fate
                self._offset += 1
                return (b"" if hidden else b"\n") + self.feed(data[1:])
        if self.closed:
            return b""
        if not self._held and (events := _plain_events(data)):
            self._count(self._offset, events)
            self._offset += len(data)
            return data
        # Only new bytes are searched (and the one before them): an event of megabytes costs its length once.
        probe = self._edge + data
        if (_BLANK.search(probe) is None) if b"\r" in probe else (b"\n\n" not in probe):
            self._hold(data, probe[-1:])
            return b""
        text = b"".join([*self._held, data])
        self._held, self._held_size = [], 0
        whole, rest = self._cut(text)
        self._hold(rest, rest[-1:])
        return whole

    def finish(self) -> bytes:
        """The stream has ended: what is left of it, an event without its blank line."""
        text = b"".join(self._held)
        self._held, self._held_size, self._edge = [], 0, b""
        return text if self._keep(text) else b""

    def _hold(self, data: bytes, edge: bytes) -> None:
        self._edge = edge
        if data:
            self._held.append(data)
            self._held_size += len(data)
            if self._held_size > self._largest:
                raise EventTooLarge

    def _cut(self, text: bytes) -> tuple[bytes, bytes]:
        """Account for every whole event of `text`; (what may pass, the unfinished rest)."""
        bare = b"\r" not in text
        kept: list[bytes] = []
        hidden = False
        start = 0
        while True:
            end = self._end_of_event(text, start, bare)
            if end < 0:
                break
            block = text[start:end]
            keep = self._keep(block)
            if keep:
                kept.append(block)
            hidden = hidden or not keep
            if end == len(text) and not bare and text.endswith(b"\r"):
                self._cr = not keep
            start = end
            if self.closed:
                return b"".join(kept), b""
        rest = text[start:]
        return (b"".join(kept) if hidden else text[:start]), rest

    @staticmethod
    def _end_of_event(text: bytes, start: int, bare: bool) -> int:
        if bare:
            at = text.find(b"\n\n", start)
            return -1 if at < 0 else at + 2
        match = _BLANK.search(text, start)
        return -1 if match is None else match.end()

    def _keep(self, block: bytes) -> bool:
        """Account for one event; may it pass?"""
        at, self._offset = self._offset, self._offset + len(block)
        if block.startswith(b"data: {") and not _tells(block):
            self._count(at)
            return True
        return self._read(block, at)

    def _count(self, at: int, events: int = 1) -> None:
        self.events += events
        if self.first_at is None:
            self.first_at = at

    def _read(self, block: bytes, at: int) -> bool:
        payload, name = _fields(block)
        if payload is None:
            return True
        if payload.strip() == _DONE:
            self.finished = self.done = self.closed = True
            return True
        self._count(at + len(block) - len(block.lstrip(b"\r\n")))
        value = decoded(payload)
        if name == b"error" or (value is not None and error_in(value)):
            self.error = self.error or payload
            return True
        if value is None:
            return True
        self.usage = usage_in(value, self.usage) or self.usage
        self.finished = self.finished or finish_in(value)
        self.done = self.done or kind_of(value) in FINAL_TYPES
        return not (self._hide_usage and usage_only(value))


def _plain_events(data: bytes) -> int:
    """How many events, if `data` is nothing but whole one-line events of mere text; else 0. The common case."""
    if not (data.startswith(b"data: {") and data.endswith(b"}\n\n")) or b"\r" in data or _tells(data):
        return 0
    lines = data.count(b"\n")
    whole = lines == 2 or (lines == 2 * data.count(b"\n\n") == 2 * data.count(b"\n\ndata: {") + 2)
    return lines // 2 if whole else 0


def _tells(block: bytes) -> bool:
    """May this event carry more than text? Cheap and never wrong about "no"; "yes" is verified by parsing."""
    return (
        b'"error"' in block
        or (b'"usage"' in block and block.count(b'"usage"') != block.count(b'"usage":null'))
        or block.count(b'"finish_reason"') != block.count(b'"finish_reason":null')
        or (b'"type"' in block and b'"choices"' not in block)
    )


def _fields(block: bytes) -> tuple[bytes | None, bytes]:
    """(data of an event with its lines joined, None if it has none; its event name)."""
    data: list[bytes] = []
    name = b""
    for line in _LINE_END.split(block):
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ").strip()
    return (b"\n".join(data) if data else None), name
