"""One JSON line a call (and a gateway event), written by a thread so that a slow reader never stops the event loop."""

from __future__ import annotations

import re
import threading
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from typing import TextIO

import msgspec

from gateway.core.types import Record, Usage

GATHER = 0.02  # seconds between writes: wakes the thread, and so disturbs the loop, at most 50 times a second
LONGEST = 2000  # characters of one value; a caller's model name may be any length
NOT_PLAIN = re.compile(r"[^\x20-\x7e]")
COLUMNS = tuple(column.name for column in fields(Record) if column.name != "usage")

Entry = tuple[float, "Record | Mapping[str, object]"]


class CallLog:
    """Writes Records and events to a text stream; when `capacity` lines wait, further ones are dropped and counted.

    `clock` gives Unix time in seconds. A Record must not change after `write`.
    """

    def __init__(self, stream: TextIO, capacity: int = 10_000, clock: Callable[[], float] = time.time) -> None:
        self._stream = stream
        self._capacity = capacity
        self._clock = clock
        self._waiting: deque[Entry] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._encoder = msgspec.json.Encoder(enc_hook=str)
        self._dropped = 0
        self._lost = 0
        self._told = 0
        self._thread = threading.Thread(target=self._run, name="call-log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines lost because too many were waiting, the stream failed, or the log was closed."""
        return self._dropped + self._lost

    def write(self, record: Record) -> None:
        """Queue the line of a call that is over. Never blocks, never raises."""
        self._put(record)

    def event(self, name: str, **about: object) -> None:
        """Queue the line of something that happened to the gateway, such as a drain. Never blocks, never raises."""
        self._put({**about, "event": name})

    def close(self, timeout: float = 5.0) -> None:
        """Write what is waiting and end the thread, within `timeout` seconds. Blocks: call it off the event loop."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout)
        if not self._thread.is_alive():
            self._dropped += len(self._waiting)  # queued by another thread while we closed
            self._waiting.clear()

    def _put(self, what: Record | Mapping[str, object]) -> None:
        if len(self._waiting) >= self._capacity or self._closing.is_set():
            self._dropped += 1
            return
        self._waiting.append((self._clock(), what))
        if not self._wake.is_set():
            self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            last = self._closing.is_set()  # looked at before emptying: nothing is queued after it
            self._write_waiting()
            if last:
                return
            self._closing.wait(GATHER)

    def _write_waiting(self) -> None:
        lines = []
        for _ in range(len(self._waiting)):
            at, what = self._waiting.popleft()
            lines.append(self._line(at, what))
        if self.dropped > self._told:
            self._told = self.dropped
            lines.append(self._line(self._clock(), {"event": "log_dropped", "lines": self._told}))
        if not lines:
            return
        try:
            self._stream.write("".join(lines))
            self._stream.flush()
        except (OSError, ValueError):  # the reader is gone, or the stream was closed under us
            self._lost += len(lines)
            self._told = self.dropped

    def _line(self, at: float, what: Record | Mapping[str, object]) -> str:
        row: dict[str, object] = {"time": datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")}
        row.update(of_record(what) if isinstance(what, Record) else what)
        try:
            text = self._encoder.encode({key: tidy(value) for key, value in row.items()}).decode()
        except (UnicodeEncodeError, TypeError, RecursionError) as error:
            text = self._encoder.encode({"time": row["time"], "event": "log_failed", "why": str(error)[:200]}).decode()
        return (text if text.isascii() and "\x7f" not in text else NOT_PLAIN.sub(escaped, text)) + "\n"


def of_record(record: Record) -> dict[str, object]:
    """The row of a call: its fields without Nones, usage as plain counts."""
    row: dict[str, object] = {"event": "call"}
    for column in COLUMNS:
        value = getattr(record, column)
        if value is not None:
            row[column] = value
    usage: Usage | None = record.usage
    if usage is not None:
        row["prompt_tokens"] = usage.prompt
        row["completion_tokens"] = usage.completion
        row["cached_tokens"] = usage.cached
        row["usage_estimated"] = usage.estimated
    return row


def tidy(value: object) -> object:
    """A value fit for a line: seconds to the microsecond, text of bounded length without lone surrogates."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, str):
        return str(value)[:LONGEST].encode("utf-8", "replace").decode()
    return value


def escaped(match: re.Match[str]) -> str:
    """A control, format or line-breaking character as JSON escapes; any other character as it is."""
    character = match[0]
    if unicodedata.category(character)[0] != "C" and unicodedata.category(character) not in ("Zl", "Zp"):
        return character
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))
