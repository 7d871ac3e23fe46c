"""Prometheus text of an engine → its load: exact names, data-parallel engines combined, doubt means unknown."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from gateway.core.types import EndpointLoad
from gateway.upstream.engines import ALIASES, NAMES, Alias, Signal

LARGEST_EXPOSITION = 4 * 1024 * 1024
_SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?\s+(\S+)')
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_NAME_END = re.compile(r"[{\s]")


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: labels and value; the value may be anything a float can be."""

    labels: dict[str, str]
    value: float


def parse_exposition(text: str | bytes, at: float) -> EndpointLoad:
    """The load told by `text`, read at clock `at` seconds; what is absent, NaN, infinite or negative is None.

    Never raises. Text of another kind (HTML, compressed bytes) tells nothing; more than 4 MiB is not read.
    """
    if len(text) > LARGEST_EXPOSITION:
        return EndpointLoad(at=at)
    found = _samples(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)
    block_size = _first(Signal.BLOCK_SIZE, found)
    blocks = _first(Signal.BLOCKS, found)
    return EndpointLoad(
        at=at,
        running=_total(_first(Signal.RUNNING, found)),
        waiting=_total(_first(Signal.WAITING, found)),
        kv_usage=_fraction(_first(Signal.KV_USAGE, found)),
        preemptions=_total(_first(Signal.PREEMPTIONS, found)),
        kv_block_size=_whole(max(block_size)) if block_size else None,
        kv_blocks=_whole(sum(blocks)) if blocks else None,
    )


def _samples(text: str) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for line in text.split("\n"):
        name = _NAME_END.split(line, maxsplit=1)[0]
        if name.removesuffix("_total") not in NAMES:
            continue
        match = _SAMPLE.match(line)
        if match is not None:
            labels = dict(_LABEL.findall(match[2] or ""))
            found.setdefault(name, []).append(Sample(labels, _number(match[3])))
    return found


def _first(signal: Signal, found: dict[str, list[Sample]]) -> list[float] | None:
    """Values under the first name that is there and sound in all its series; one bad series spoils the sum."""
    for alias in ALIASES:
        if alias.signal is signal:
            for name in (alias.name, alias.name + "_total"):
                values = _values(alias, found.get(name, []))
                if values and all(math.isfinite(value) and value >= 0 for value in values):
                    return values
    return None


def _values(alias: Alias, samples: list[Sample]) -> list[float]:
    if alias.in_label is not None:
        return [_number(sample.labels.get(alias.in_label, "")) for sample in samples]
    return [s.value for s in samples if alias.only is None or s.labels.get(alias.only[0]) == alias.only[1]]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _total(values: list[float] | None) -> float | None:
    return None if values is None else sum(values)


def _fraction(values: list[float] | None) -> float | None:
    """The fullest cache decides: new work may land on any of the engines behind one address."""
    if values is None or max(values) > 1.01:
        return None
    return min(max(values), 1.0)


def _whole(value: float) -> int | None:
    return int(value) if value >= 1 else None
