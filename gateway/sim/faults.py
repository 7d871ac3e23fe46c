"""Faults a test or a demo can switch on in a simulated engine, and the JSON orders that do it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from math import inf
from typing import Generic, TypeVar

T = TypeVar("T")


class FaultError(ValueError):
    """An order that makes no sense; the message names the key."""


class MetricsMode(StrEnum):
    """How GET /metrics answers."""

    LIVE = "live"
    FROZEN = "frozen"
    BROKEN = "broken"
    ERROR = "500"
    SLOW = "slow"
    OLD_NAMES = "old_names"


@dataclass(frozen=True, slots=True)
class Break:
    """A stream ends badly once `after` tokens are out: by an error event of status `code`, or cut (FIN or RST)."""

    after: int
    code: int | None = None
    rst: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """A generation request is answered with this status; message None is vLLM's text for it."""

    status: int
    message: str | None = None


@dataclass(slots=True)
class Armed(Generic[T]):
    """A fault for the next `left` requests; None is "until reset"."""

    fault: T
    left: int | None

    def take(self) -> T | None:
        """The fault for one request, or None when it is used up."""
        if self.left is None:
            return self.fault
        self.left -= 1
        return self.fault if self.left >= 0 else None


_ERRORS = frozenset(status for status in HTTPStatus if status >= HTTPStatus.BAD_REQUEST)
_STREAM_KEYS = frozenset({"cut_after", "rst", "error_event_after", "code", "count"})
_KEYS = _STREAM_KEYS | {"freeze", "slow", "refuse", "status", "message", "metrics", "delay", "reset"}


@dataclass(slots=True)
class Faults:
    """The faults in force. Times are on the event loop's clock, seconds; `order` keeps what was asked for GET."""

    frozen_until: float = 0.0
    refusing_until: float = 0.0
    slow: float = 1.0
    metrics: MetricsMode = MetricsMode.LIVE
    metrics_delay: float = 3.0
    breaks: Armed[Break] | None = None
    answers: Armed[Answered] | None = None
    order: dict[str, object] = field(default_factory=dict)

    def next_break(self) -> Break | None:
        """The bad ending of the next stream, if any."""
        return self.breaks.take() if self.breaks else None

    def next_answer(self) -> Answered | None:
        """The answer to the next generation request, if it is not to be served."""
        return self.answers.take() if self.answers else None

    def shown(self) -> dict[str, object]:
        """What is in force, as JSON values."""
        left = {
            "streams_left": self.breaks.left if self.breaks else 0,
            "statuses_left": self.answers.left if self.answers else 0,
        }
        return {**self.order, **left}


def ordered(faults: Faults, body: bytes, now: float) -> Faults:
    """The faults after one JSON order; keys not named stay as they were. Raises FaultError, changing nothing."""
    try:
        order = json.loads(body or b"{}")
    except ValueError as error:
        raise FaultError(f"not JSON: {error}") from error
    if not isinstance(order, dict):
        raise FaultError("an order is a JSON object")
    unknown = sorted(set(order) - _KEYS)
    if unknown:
        raise FaultError(f"unknown keys: {', '.join(unknown)}")
    reset = _flag(order, "reset")
    old = Faults() if reset else faults
    return Faults(
        frozen_until=_until(order, "freeze", now, old.frozen_until),
        refusing_until=_until(order, "refuse", now, old.refusing_until),
        slow=_number(order, "slow", old.slow),
        metrics=_metrics(order, old.metrics),
        metrics_delay=_number(order, "delay", old.metrics_delay),
        breaks=_breaks(order, old.breaks),
        answers=_answers(order, old.answers),
        order={**old.order, **{key: value for key, value in order.items() if key != "reset"}},
    )


def _breaks(order: dict[str, object], old: Armed[Break] | None) -> Armed[Break] | None:
    if "cut_after" in order and "error_event_after" in order:
        raise FaultError("cut_after and error_event_after exclude each other")
    if "cut_after" in order:
        return Armed(Break(_whole(order, "cut_after"), rst=_flag(order, "rst")), _count(order))
    if "error_event_after" in order:
        code = _whole(order, "code") if "code" in order else 500
        if code not in _ERRORS:
            raise FaultError("code must be an HTTP error status")
        return Armed(Break(_whole(order, "error_event_after"), code=code), _count(order))
    return old


def _answers(order: dict[str, object], old: Armed[Answered] | None) -> Armed[Answered] | None:
    if "status" not in order:
        return old
    status, message = _whole(order, "status"), order.get("message")
    if status not in _ERRORS or not isinstance(message, str | None):
        raise FaultError("status must be an HTTP error status, message a string")
    return Armed(Answered(status, message), _count(order))


def _metrics(order: dict[str, object], old: MetricsMode) -> MetricsMode:
    value = str(order.get("metrics", old))
    if value not in set(MetricsMode):
        raise FaultError(f"metrics must be one of {', '.join(MetricsMode)}")
    return MetricsMode(value)


def _until(order: dict[str, object], key: str, now: float, old: float) -> float:
    value = order.get(key)
    if isinstance(value, bool):
        return inf if value else 0.0
    return old if value is None else now + _number(order, key, 0.0)


def _count(order: dict[str, object]) -> int | None:
    return _whole(order, "count") if "count" in order else None


def _whole(order: dict[str, object], key: str) -> int:
    value = order[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise FaultError(f"{key} must be a whole number, at least 0")
    return value


def _number(order: dict[str, object], key: str, default: float) -> float:
    value = order.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
        raise FaultError(f"{key} must be a number, at least 0")
    return float(value)


def _flag(order: dict[str, object], key: str) -> bool:
    value = order.get(key, False)
    if not isinstance(value, bool):
        raise FaultError(f"{key} must be true or false")
    return value
