"""Figures of a run: medians over rounds, the table, and the JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median


@dataclass(frozen=True, slots=True)
class Figures:
    """What one gateway costs; None where it could not be measured.

    `us_*`: microseconds of processor time of all its threads. `busy`: share of its core used at saturation; well
    below 1 something else was the bottleneck. `us_per_chunk`: paced streams, of which it `carried` that share;
    `us_per_chunk_back_to_back`: streams without pacing. `added_*`: milliseconds over a call straight to the upstream.
    `rss_mib`, `pss_mib`: memory after the streams, or after the calls if that is more.
    """

    us_per_request: float | None = None
    requests_per_second: float | None = None
    busy: float | None = None
    us_per_chunk: float | None = None
    carried: float | None = None
    us_per_chunk_back_to_back: float | None = None
    added_p50_ms: float | None = None
    added_p99_ms: float | None = None
    rss_mib: float | None = None
    pss_mib: float | None = None


NAMES = tuple(field.name for field in fields(Figures))
_HEADINGS = (
    "us/request", "requests/s", "busy", "us/chunk", "carried", "us/chunk b2b",
    "+p50 ms", "+p99 ms", "RSS MiB", "PSS MiB",
)  # fmt: skip
_DIGITS = (1, 0, 2, 1, 2, 1, 3, 3, 1, 1)


def medians(rounds: Sequence[Figures]) -> Figures:
    """Each figure's median over the rounds that have it."""

    def middle(name: str) -> float | None:
        known = [value for figures in rounds if (value := getattr(figures, name)) is not None]
        return median(known) if known else None

    return Figures(**{name: middle(name) for name in NAMES})


def table(results: Mapping[str, Figures]) -> list[str]:
    """One line a gateway, in the order given."""
    first = max([len(name) for name in results] + [8])
    lines = [" ".join([" " * first, *(f"{heading:>12}" for heading in _HEADINGS)])]
    for name, figures in results.items():
        cells = (_cell(getattr(figures, field), digits) for field, digits in zip(NAMES, _DIGITS, strict=True))
        lines.append(" ".join([f"{name:<{first}}", *cells]))
    return lines


def _cell(value: float | None, digits: int) -> str:
    return f"{'-' if value is None else format(value, f'.{digits}f'):>12}"


def as_json(results: Mapping[str, Figures]) -> str:
    """`{"tiergate": {"us_per_request": ...}, ...}`; a figure that could not be had is null."""
    rounded = {
        name: {field: None if value is None else round(value, 4) for field, value in asdict(figures).items()}
        for name, figures in results.items()
    }
    return json.dumps(rounded, indent=2)
