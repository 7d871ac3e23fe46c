from __future__ import annotations

import json
from dataclasses import replace

import pytest

from loadtests.client import Ended
from loadtests.openloop import CallResult
from loadtests.report import as_json, lines, percentile, summarise

SERVED = CallResult(0.0, 0.001, 200, Ended.WHOLE, "", "small", False, 0.1, 1.1, 101)
REFUSED = CallResult(0.0, 0.0, 503, Ended.WHOLE, "past_knee", "small", True, 0.003, 0.003, 0)


@pytest.mark.parametrize(("part", "value"), [(0.0, 1), (0.01, 1), (0.5, 50), (0.99, 99), (0.991, 100), (1.0, 100)])
def test_a_percentile_is_one_of_the_values(part: float, value: int) -> None:
    assert percentile(list(range(100, 0, -1)), part) == value


def test_nothing_has_no_percentile() -> None:
    assert percentile([], 0.5) is None


def test_a_summary_counts_every_call_once() -> None:
    results = [
        *[replace(SERVED, first_token=0.1 * each) for each in range(1, 5)],
        REFUSED,
        replace(REFUSED, retry_after=False, total=0.2),
        replace(REFUSED, reason="fair_share"),
        replace(SERVED, ended=Ended.CUT),
        replace(SERVED, status=500),
        replace(SERVED, ended=Ended.HUNG),
        replace(SERVED, ended=Ended.UNSENT, status=0),
    ]
    summary = summarise(results)
    assert (summary.sent, summary.answered, summary.refused, summary.hung, summary.unsent) == (10, 4, 3, 1, 1)
    assert summary.failed == {"cut": 1, "status 500": 1}
    assert (summary.first_token.p50, summary.first_token.most) == (0.2, 0.4)
    fair, knee = summary.refusals
    assert (fair.code, fair.count, knee.code, knee.count, knee.with_retry_after) == ("fair_share", 1, "past_knee", 2, 1)
    assert knee.after.p99 == 0.2


def test_gaps_between_tokens_are_those_of_answered_streams() -> None:
    summary = summarise([SERVED, replace(SERVED, events=1), REFUSED])
    assert summary.inter_token.most == pytest.approx(0.01)


def test_text_and_json_tell_the_same() -> None:
    summary = summarise([SERVED, REFUSED, replace(SERVED, ended=Ended.CUT)])
    text = "\n".join(lines(summary))
    assert "answered 1, refused 1, hung 0" in text
    assert "100.0 ms" in text
    assert "past_knee" in text
    assert "Retry-After on 1 of 1" in text
    told = json.loads(as_json(summary))
    assert told["answered"] == 1
    assert told["first_token"]["p50"] == 0.1
    assert told["refusals"][0]["code"] == "past_knee"
    assert told["failed"] == {"cut": 1}


def test_an_empty_run_can_be_told() -> None:
    assert "sent 0" in lines(summarise([]))[0]
