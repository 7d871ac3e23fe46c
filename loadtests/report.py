"""What a run's results amount to: percentiles, counts by ending and by refusal code, as text or JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from loadtests.client import Ended
from loadtests.openloop import CallResult


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of times in seconds; None: there were none."""

    p50: float | None
    p95: float | None
    p99: float | None
    most: float | None


@dataclass(frozen=True, slots=True)
class Refusals:
    """Calls refused with one code: how long until they knew, and how many were told when to come back."""

    code: str
    count: int
    with_retry_after: int
    after: Spread


@dataclass(frozen=True, slots=True)
class Summary:
    """A run. `failed` counts by what came instead of an answer or a refusal; `late` is the generator's own delay."""

    sent: int
    answered: int
    events: int
    first_token: Spread
    inter_token: Spread
    total: Spread
    refusals: tuple[Refusals, ...]
    failed: dict[str, int]
    hung: int
    unsent: int
    late: Spread

    @property
    def refused(self) -> int:
        """Calls refused, whatever the code."""
        return sum(each.count for each in self.refusals)


def percentile(values: Sequence[float], part: float) -> float | None:
    """The smallest of `values` that at least `part` (0..1) of them do not exceed; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def spread(values: Iterable[float | None]) -> Spread:
    """Percentiles of those that are not None."""
    known = [value for value in values if value is not None]
    return Spread(percentile(known, 0.5), percentile(known, 0.95), percentile(known, 0.99), percentile(known, 1.0))


def summarise(results: Sequence[CallResult]) -> Summary:
    """Everything worth saying about `results`; times of tokens are those of answered calls."""
    answered = [each for each in results if each.answered]
    other = [each for each in results if not (each.answered or each.refused)]
    kept_out = {Ended.HUNG, Ended.UNSENT}
    return Summary(
        sent=sum(each.ended is not Ended.UNSENT for each in results),
        answered=len(answered),
        events=sum(each.events for each in results),
        first_token=spread(each.first_token for each in answered),
        inter_token=spread(each.inter_token for each in answered),
        total=spread(each.total for each in answered),
        refusals=_refusals([each for each in results if each.refused]),
        failed=dict(Counter(_failure(each) for each in other if each.ended not in kept_out)),
        hung=sum(each.ended is Ended.HUNG for each in results),
        unsent=sum(each.ended is Ended.UNSENT for each in results),
        late=spread(each.late for each in results),
    )


def _refusals(refused: Sequence[CallResult]) -> tuple[Refusals, ...]:
    by_code: dict[str, list[CallResult]] = {}
    for each in refused:
        by_code.setdefault(each.reason, []).append(each)
    return tuple(
        Refusals(code, len(calls), sum(each.retry_after for each in calls), spread(each.total for each in calls))
        for code, calls in sorted(by_code.items())
    )


def _failure(result: CallResult) -> str:
    return result.ended.value if result.ended is not Ended.WHOLE else f"status {result.status}"


def milliseconds(seconds: float | None) -> str:
    """A time as text, `-` where there is none."""
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"


def lines(summary: Summary) -> list[str]:
    """The summary as plain text: a line a fact, then a table of refusals."""
    first, gap = summary.first_token, summary.inter_token
    told = [
        f"sent {summary.sent}, answered {summary.answered}, refused {summary.refused}, hung {summary.hung}, "
        f"unsent {summary.unsent}, failed {sum(summary.failed.values())}",
        f"first token of answered   P50 {milliseconds(first.p50):>12}   P99 {milliseconds(first.p99):>12}",
        f"between tokens            P50 {milliseconds(gap.p50):>12}   P99 {milliseconds(gap.p99):>12}",
    ]
    told += [
        f"refused {each.code:<22} {each.count:>7}   P50 {milliseconds(each.after.p50):>9}"
        f"   P99 {milliseconds(each.after.p99):>9}   Retry-After on {each.with_retry_after} of {each.count}"
        for each in summary.refusals
    ]
    told += [f"failed  {what:<22} {count:>7}" for what, count in sorted(summary.failed.items())]
    return [*told, f"generator late            P50 {milliseconds(summary.late.p50):>12}"
            f"   P99 {milliseconds(summary.late.p99):>12}"]  # fmt: skip


def as_json(outcome: Any) -> str:
    """A dataclass as JSON text; times in seconds."""
    content = asdict(outcome) if is_dataclass(outcome) and not isinstance(outcome, type) else outcome
    return json.dumps(content, indent=2)
