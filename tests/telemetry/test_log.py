"""One line a call, whatever is in it, and never in the way of the event loop."""

from __future__ import annotations

import io
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.types import Outcome, Record, Usage
from gateway.telemetry import CallLog


def lines(*records: Record, **about: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text(*records, **about).splitlines()]


def text(*records: Record, **about: Any) -> str:
    stream = io.StringIO()
    log = CallLog(stream, clock=lambda: 1_700_000_000.25)
    for record in records:
        log.write(record)
    if about:
        log.event("started", **about)
    log.close()
    assert log.dropped == 0
    return stream.getvalue()


class Stuck(io.StringIO):
    """A stream whose reader does not read until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.let_go = threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        assert self.let_go.wait(10)
        return super().write(text)


class Broken(io.StringIO):
    """A stream whose reader is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_call_is_one_flat_line_without_nones() -> None:
    record = Record(
        id="r1",
        tenant="acme",
        band="online",
        pool="small",
        why="classifier:0.73",
        outcome=Outcome.FAILED,
        reason="upstream_error",
        status=502,
        wait=0.1234567891,
        duration=1.5,
        usage=Usage(prompt=7, completion=3, cached=2),
    )
    (row,) = lines(record)
    assert row["event"] == "call"
    assert row["time"] == "2023-11-14T22:13:20.250+00:00"
    assert (row["outcome"], row["reason"], row["status"]) == ("failed", "upstream_error", 502)
    assert row["wait"] == 0.123457
    assert (row["prompt_tokens"], row["completion_tokens"], row["cached_tokens"]) == (7, 3, 2)
    assert row["usage_estimated"] is False
    assert not {"first_token", "inter_token", "usage"} & set(row)


def test_lines_keep_their_order() -> None:
    assert [row["id"] for row in lines(*(Record(id=str(n)) for n in range(500)))] == [str(n) for n in range(500)]


def test_an_event_is_a_line_too() -> None:
    (row,) = lines(endpoint="10.0.0.1:8000", after=3.0, left=object)
    assert (row["event"], row["endpoint"], row["after"]) == ("started", "10.0.0.1:8000", 3.0)


@pytest.mark.parametrize(
    "character", ["\n", "\r", "\x00", "\x1b", "\x7f", "\x85", "\u2028", "\u2029", "\u202e", "\ufeff", "\U000e0001"]
)
def test_no_character_can_break_the_line_or_the_terminal(character: str) -> None:
    written = text(Record(id="r", model=f"a{character}b"))
    assert written.count("\n") == 1
    assert character not in written.removesuffix("\n")
    assert json.loads(written)["model"] == f"a{character}b"


@given(st.text(alphabet=st.characters(), max_size=50))
def test_any_text_is_one_line_of_json(model: str) -> None:
    (row,) = lines(Record(id="r", model=model))
    assert row["model"] == model.encode("utf-8", "replace").decode()


def test_a_huge_value_is_cut() -> None:
    assert len(text(Record(id="r", model="x" * 1_000_000))) < 4000


def test_a_value_that_is_no_number_is_null() -> None:
    assert lines(Record(id="r", wait=float("nan")))[0]["wait"] is None


def test_a_value_that_cannot_be_written_is_told() -> None:
    (row,) = lines(bad={("a", "b"): "\ud800"})
    assert row["event"] == "log_failed"


def test_a_stuck_reader_costs_lines_not_time() -> None:
    stream = Stuck()
    log = CallLog(stream, capacity=10)
    log.write(Record(id="first"))
    assert stream.entered.wait(10)
    for n in range(25):
        log.write(Record(id=str(n)))
    assert log.dropped == 15
    stream.let_go.set()
    log.close()
    rows = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [row.get("id", row["event"]) for row in rows] == ["first", *(str(n) for n in range(10)), "log_dropped"]
    assert rows[-1]["lines"] == 15


def test_closing_does_not_wait_for_ever() -> None:
    stream = Stuck()
    log = CallLog(stream)
    log.write(Record(id="first"))
    assert stream.entered.wait(10)
    log.close(timeout=0.01)
    stream.let_go.set()
    log.close()
    assert stream.getvalue().count("\n") == 1


def test_a_reader_that_is_gone_is_counted() -> None:
    log = CallLog(Broken())
    log.write(Record(id="r"))
    log.close()
    log.write(Record(id="late"))
    assert log.dropped == 2
