"""Written values to typed ones: durations, sizes, rates, addresses, comparisons, hours of the week."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from gateway.config.mistakes import did_you_mean, kind_of
from gateway.config.tree import DECIMAL, INTEGER, FromEnv
from gateway.core.types import Rate

DURATION_UNITS: Mapping[str, float] = MappingProxyType({"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0})
SIZE_UNITS: Mapping[str, int] = MappingProxyType({"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30})
AMOUNTS: Mapping[str, float] = MappingProxyType({"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9})
PERIODS: Mapping[str, float] = MappingProxyType({"s": 1.0, "min": 60.0, "h": 3600.0, "hour": 3600.0, "day": 86400.0})
QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*/\s*([A-Za-z]+)")
PERCENTAGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")
COMPARISON = re.compile(r"\s*(>=|<=|>|<|==)\s*([0-9]+)\s*")
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
FREEZE = re.compile(
    r"([A-Z][a-z]{2})(?:-([A-Z][a-z]{2}))?\s+([0-2][0-9]):([0-5][0-9])-([0-2][0-9]):([0-5][0-9])\s+(\S+)"
)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A bound on a whole number, as `>6000`; `sign` is one of > >= < <= ==."""

    sign: str
    bound: int

    def holds(self, value: int) -> bool:
        """Whether `value` is on the asked side of the bound."""
        return {
            ">": value > self.bound,
            ">=": value >= self.bound,
            "<": value < self.bound,
            "<=": value <= self.bound,
            "==": value == self.bound,
        }[self.sign]

    def __str__(self) -> str:
        return f"{self.sign}{self.bound}"


@dataclass(frozen=True, slots=True)
class Freeze:
    """Hours of the week in which nothing is released; days are 0 (Monday) to 6, start and end minutes of the day.

    A window whose end is not after its start runs past midnight and belongs to the day it starts on.
    """

    days: frozenset[int]
    start: int
    end: int
    zone: str
    text: str

    def __str__(self) -> str:
        return self.text

    def covers(self, at: float) -> bool:
        """Whether Unix time `at` (seconds) is inside."""
        local = datetime.fromtimestamp(at, ZoneInfo(self.zone))
        day, minute = local.weekday(), local.hour * 60 + local.minute
        if self.start < self.end:
            return day in self.days and self.start <= minute < self.end
        return (day in self.days and minute >= self.start) or ((day - 1) % 7 in self.days and minute < self.end)


def shown(value: object) -> str:
    """A value for a message, with its kind; never what the environment put there."""
    if isinstance(value, FromEnv):
        return f"the value of {value.origin}"
    if isinstance(value, list | dict) or value is None:
        return kind_of(value)
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({kind_of(value)})"


def quoted(value: object) -> str:
    """Text for a message, in quotes; never what the environment put there."""
    return value.origin if isinstance(value, FromEnv) else repr(value)


def whole(value: object) -> int:
    """A whole number; from the environment also as digits."""
    if isinstance(value, FromEnv) and INTEGER.fullmatch(value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"must be a whole number, such as 8, without quotes; not {shown(value)}")


def number(value: object) -> float:
    """A number; a percentage is answered with how to write it."""
    if isinstance(value, FromEnv) and (INTEGER.fullmatch(value) or DECIMAL.fullmatch(value)):
        return float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = PERCENTAGE.fullmatch(value) if isinstance(value, str) else None
    if match and not isinstance(value, FromEnv):
        fraction = f"{float(match[1]) / 100:.6g}"
        raise ValueError(f"must be a number, not a percentage: write {fraction} for {shown(value)}")
    raise ValueError(f"must be a number, such as 0.05, without quotes; not {shown(value)}")


def flag(value: object) -> bool:
    """true or false; from the environment also as those words."""
    if isinstance(value, bool):
        return value
    if isinstance(value, FromEnv) and value in ("true", "false"):
        return value == "true"
    raise ValueError(f"must be true or false, not {shown(value)}")


def text(value: object) -> str:
    """Text that is not empty."""
    if not isinstance(value, str):
        raise ValueError(f"must be text, in quotes if it looks like something else; not {shown(value)}")
    if not value.strip():
        raise ValueError("must not be empty")
    return str(value)


def duration(value: object) -> float:
    """Seconds of `2s`, `25ms`, `1h`, `5m`, `7d` or 0."""
    match = QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if is_zero(value):
        return 0.0
    if match and match[2] in DURATION_UNITS:
        return float(match[1]) * DURATION_UNITS[match[2]]
    raise ValueError(f"must be a duration with its unit (25ms, 2s, 5m, 1h, 7d) or 0; not {shown(value)}")


def size(value: object) -> int:
    """Bytes of `8MiB`, `64KiB`, `1GiB`, `512B` or 0."""
    match = QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if is_zero(value):
        return 0
    if match and match[2] in SIZE_UNITS:
        return int(float(match[1]) * SIZE_UNITS[match[2]])
    raise ValueError(f"must be a size with its unit (512B, 64KiB, 8MiB, 1GiB) or 0; not {shown(value)}")


def rate(value: object) -> Rate:
    """Amount and period of `600/min`, `50M/day`, `10/s` or 0 (nothing at all)."""
    match = RATE.fullmatch(value) if isinstance(value, str) else None
    if is_zero(value):
        return Rate(0.0, 60.0)
    if match and match[2] in AMOUNTS and match[3] in PERIODS:
        return Rate(float(match[1]) * AMOUNTS[match[2]], PERIODS[match[3]])
    raise ValueError(f"must be an amount a period (10/s, 600/min, 200k/h, 50M/day) or 0; not {shown(value)}")


def rate_text(value: Rate) -> str:
    """A rate as it is written, such as `600/min`."""
    unit = next((word for word, seconds in PERIODS.items() if seconds == value.period), f"{value.period:g}s")
    return f"{value.amount:.12g}/{unit}"


def is_zero(value: object) -> bool:
    """Whether a bare 0 is written, which needs no unit."""
    return (isinstance(value, int) and not isinstance(value, bool) and value == 0) or value == "0"


def address(value: object) -> Address:
    """Host and port of `0.0.0.0:8000` or `[::1]:8000`."""
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if bare and (bare != host or ":" not in host) and INTEGER.fullmatch(port) and 0 <= int(port) <= 65535:
        return Address(bare, int(port))
    raise ValueError(f'must be "host:port" with a port up to 65535, such as "127.0.0.1:8001"; not {shown(value)}')


def comparison(value: object) -> Comparison:
    """Sign and bound of `>6000`."""
    if isinstance(value, str) and (match := COMPARISON.fullmatch(value)):
        return Comparison(match[1], int(match[2]))
    raise ValueError(f'must be a comparison in quotes, such as ">6000" or "<=200"; not {shown(value)}')


def freeze(value: object) -> Freeze:
    """Days, hours and zone of `Mon-Fri 09:00-21:00 Asia/Shanghai`."""
    match = FREEZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if not match or int(match[3]) > 23 or int(match[5]) * 60 + int(match[6]) > 1440:
        raise ValueError(
            f'must be days, hours and zone, such as "Mon-Fri 09:00-21:00 Asia/Shanghai"; not {shown(value)}'
        )
    first, last = match[1], match[2] or match[1]
    for day in (first, last):
        if day not in DAYS:
            raise ValueError(f"has no day {day!r}; days are {', '.join(DAYS)}{did_you_mean(day, DAYS)}")
    try:
        ZoneInfo(match[7])
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"has no known time zone {match[7]!r}; write one such as Asia/Shanghai or UTC") from None
    span = (DAYS.index(last) - DAYS.index(first)) % 7
    days = frozenset((DAYS.index(first) + step) % 7 for step in range(span + 1))
    return Freeze(days, int(match[3]) * 60 + int(match[4]), int(match[5]) * 60 + int(match[6]), match[7], match[0])
