from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtests.__main__ import main
from loadtests.client import Client, Ended, Target
from loadtests.gauges import GaugesError, parse, read
from loadtests.openloop import CallResult
from loadtests.overload import Left, Outcome, OverloadError, Plan, overload, promises, verdict
from tests.loadtests.server import STREAM, Server, refusal, whole

SERVED = CallResult(0.0, 0.0, 200, Ended.WHOLE, "", "small", False, 0.1, 1.1, 101)
REFUSED = CallResult(0.0, 0.0, 503, Ended.WHOLE, "past_knee", "small", True, 0.003, 0.003, 0)
NOWHERE = Target("127.0.0.1", 9)
PLAN = Plan(NOWHERE, NOWHERE, "key", "small", "small", seconds=0.5, batch_key="batch", warm_up=0.1, measured=0.3)
EMPTY = Left(0, 0, 0.1)


class FakeGateway:
    """Takes `places` calls at once for 20 ms each and refuses the others; batch callers wait until they hang up."""

    def __init__(self, places: int = 2, reason: str = "past_knee", leak: int = 0) -> None:
        self._places = places
        self._reason = reason
        self._leak = leak
        self._open = 0
        self.batch = 0

    async def script(self, number: int, head: bytes, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"GET /metrics "):
            writer.write(whole("200 OK", self._metrics().encode()))
        elif b"Bearer batch" in head:
            self.batch += 1
            await asyncio.sleep(0.05)
            writer.write(STREAM)
        elif self._open >= self._places:
            writer.write(refusal(self._reason, "retry-after: 1"))
        else:
            self._open += 1
            await asyncio.sleep(0.02)
            self._open -= 1
            writer.write(STREAM)

    def _metrics(self) -> str:
        flying = self._open + self._leak
        return (
            "# HELP tiergate_limit What it is.\n# TYPE tiergate_limit gauge\n"
            f'tiergate_limit{{pool="small"}} {self._places}.0\ntiergate_limit{{pool="large"}} 9.0\n'
            f'tiergate_in_flight{{pool="small",band="online"}} {flying}\n'
            'tiergate_in_flight{pool="small",band="batch"} 0.0\ntiergate_in_flight{pool="large",band="online"} 7\n'
            'tiergate_waiting{pool="small",band="online"} 0.0\n'
        )


async def checked(fake: FakeGateway, **changes: Any) -> Outcome:
    async with Server(fake.script) as server:
        plan = replace(PLAN, api=server.target, ops=server.target, **changes)
        return await overload(plan, lambda _: None)


async def test_a_gateway_that_keeps_its_promises() -> None:
    outcome = await checked(FakeGateway(), load=4.0)
    assert outcome.kept, verdict(outcome)
    assert 30 < outcome.capacity <= 110  # 2 places, 20 ms each
    assert outcome.offered == 4.0 * outcome.capacity
    assert outcome.online.answered > 0
    assert outcome.online.refused > outcome.online.answered
    assert outcome.batch_answered > 0
    assert (outcome.left.in_flight, outcome.left.waiting) == (0, 0)
    assert 0 < outcome.generator_cores < 1


async def test_the_capacity_may_be_given() -> None:
    outcome = await checked(FakeGateway(), capacity=20.0, load=2.0, batch_key=None)
    assert (outcome.capacity, outcome.offered, outcome.batch_answered) == (20.0, 40.0, 0)


async def test_a_slot_that_is_left_behind_breaks_a_promise() -> None:
    outcome = await checked(FakeGateway(leak=1), capacity=20.0, settle=0.2)
    assert [each.name for each in outcome.promises if not each.holds] == ["the pool is empty 0.2 s later"]
    assert not outcome.kept
    assert any(line.startswith("BROKEN") for line in verdict(outcome))


async def test_a_pool_without_a_place_or_a_name_cannot_be_checked() -> None:
    with pytest.raises(OverloadError, match="no place"):
        await checked(FakeGateway(places=0))
    with pytest.raises(OverloadError, match="tiergate_limit"):
        await checked(FakeGateway(), pool="huge")


def broken(results: list[CallResult], left: Left = EMPTY) -> list[str]:
    return [promise.name for promise in promises(PLAN, results, left) if not promise.holds]


def test_promises_that_hold() -> None:
    assert broken([SERVED, REFUSED]) == []
    assert broken([SERVED]) == []


@pytest.mark.parametrize(
    ("results", "named"),
    [
        ([REFUSED], ["calls are answered", "P99 first token <= 2 s"]),
        ([SERVED, replace(SERVED, first_token=2.1)], ["P99 first token <= 2 s"]),
        ([SERVED, replace(REFUSED, reason="queue_timeout")], ["refused only by"]),
        ([SERVED, replace(REFUSED, retry_after=False)], ["every refusal says when to come back"]),
        ([SERVED, replace(REFUSED, total=0.06)], ["P99 refusal < 50 ms"]),
        ([SERVED, replace(SERVED, ended=Ended.CUT)], ["nothing fails"]),
        ([SERVED, replace(SERVED, status=502)], ["nothing fails"]),
        ([SERVED, replace(SERVED, ended=Ended.HUNG)], ["nothing hangs"]),
        ([SERVED, replace(SERVED, ended=Ended.UNSENT, status=0)], ["nothing hangs"]),
    ],
)
def test_each_promise_can_be_broken(results: list[CallResult], named: list[str]) -> None:
    found = broken(results)
    assert len(found) == len(named)
    assert all(each.startswith(name) for each, name in zip(found, named, strict=True))


def test_what_is_left_breaks_a_promise() -> None:
    assert broken([SERVED], Left(1, 0, None)) == ["the pool is empty 2 s later"]


async def test_the_command_tells_and_exits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "outcome.json"
    async with Server(FakeGateway().script) as good, Server(FakeGateway(reason="queue_timeout").script) as bad:
        rest = ("--capacity", "40", "--seconds", "0.5", "--load", "5", "--json", str(file))
        assert await asyncio.to_thread(main, ["overload", "--url", good.url, "--ops", good.url, *rest]) == 0
        assert json.loads(file.read_text())["capacity"] == 40
        assert "kept    P99 first token <= 2 s" in capsys.readouterr().out
        assert await asyncio.to_thread(main, ["overload", "--url", bad.url, "--ops", bad.url, *rest]) == 1
        assert "BROKEN  refused only by" in capsys.readouterr().out


async def test_the_command_says_that_nobody_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    async with Server(FakeGateway().script) as server:
        gone = server.url
    assert await asyncio.to_thread(main, ["overload", "--url", gone, "--ops", gone]) == 1
    assert "/metrics" in capsys.readouterr().err


def test_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--url", "http://10.1.2.3:8000"], ["--load", "0"], ["--nothing"]):
        with pytest.raises(SystemExit) as left:
            main(["overload", *wrong])
        assert left.value.code == 2
    assert "loopback" in capsys.readouterr().err


def test_metrics_are_read_by_name_and_labels() -> None:
    gauges = parse('# HELP a A\na{x="1",y="p q"} 2.0\na{x="2"} 3\nb 1e3\n')
    assert (gauges.total("a"), gauges.total("a", x="1"), gauges.total("b")) == (5.0, 2.0, 1000.0)
    with pytest.raises(GaugesError):
        gauges.total("a", x="3")


async def test_metrics_that_cannot_be_had() -> None:
    async def absent(number: int, head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(whole("404 Not Found", b""))

    async with Server(absent) as server, Client(server.target) as client:
        with pytest.raises(GaugesError, match="404"):
            await read(client)
