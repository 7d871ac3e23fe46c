"""The end of a gateway process: everybody inside finishes, newcomers are told, and it leaves with a good code."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.client import Client, Response, chat, connected, eventually, get, post
from tests.fakes.process import Served, demo, serve, sim

pytestmark = pytest.mark.slow


def streaming(tokens: int) -> dict[str, Any]:
    """At 20 ms a token."""
    return chat(stream=True, max_tokens=tokens, ignore_eos=True)


async def begun(client: Client, tokens: int) -> Response:
    client.post(streaming(tokens))
    head = await client.head()
    assert head.status == 200
    await client.piece()
    return head


async def waiting(gate: Served, count: int) -> None:
    async def there() -> bool:
        pool = (await get(gate.ops, "/admin/state", key="key-admin")).json()["pools"][0]
        return bool(pool["waiting"]["online"] == count)

    await eventually(there)


async def status_becomes(gate: Served, path: str, status: int) -> None:
    async def is_it() -> bool:
        return (await get(gate.api, path)).status == status

    await eventually(is_it)


async def test_streams_and_waiters_finish_and_newcomers_are_refused(tmp_path: Path) -> None:
    def tight(config: dict[str, Any]) -> None:
        config["pools"]["small"]["capacity"] = {"in_flight": 2, "waiting": 4}
        config["drain"] = {"delay": "300ms", "timeout": "10s"}

    async with sim("demo-7b") as (engine, port), serve(tmp_path, port, change=tight) as gate:
        async with connected(gate.api) as one, connected(gate.api) as two, connected(gate.api) as third:
            heads = [await begun(one, 60), await begun(two, 60)]
            third.post(streaming(3))
            await waiting(gate, 1)
            gate.process.signal(signal.SIGTERM)
            await status_becomes(gate, "/readyz", 503)
            assert (await get(gate.api, "/livez")).status == 200
            # In the delay newcomers are still served: load balancers need a moment to look elsewhere.
            async with connected(gate.api) as late:
                late.post(streaming(2))
                await waiting(gate, 2)
                refused = await first_refusal(gate)
                assert (refused.status, refused.error["code"]) == (503, "draining")
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.headers["connection"] == "close"
                answers = [await one.rest(heads[0]), await two.rest(heads[1])]
                answers += [await third.response(), await late.response()]
            assert [answer.status for answer in answers] == [200] * 4
            assert all(answer.done for answer in answers)
            assert answers[3].headers["connection"] == "close"
        assert await gate.process.ended() == 0
        engine.signal(signal.SIGTERM)
        assert await engine.ended() == 0
    events = [event["event"] for event in gate.events()]
    assert events[0] == "started"
    assert events.index("draining") < events.index("stopped") == len(events) - 1
    outcomes = [event["outcome"] for event in gate.events() if event["event"] == "call"]
    assert outcomes.count("ok") == 4
    assert not [line for line in gate.process.err if "INFO" not in line]


async def first_refusal(gate: Served) -> Response:
    """Newcomers are served, or wait, until the delay is over."""
    while True:
        answer = await post(gate.api, chat(max_tokens=1), x_tiergate_timeout="0.05")
        if answer.error["code"] == "draining":
            return answer


async def test_who_is_not_done_in_time_is_told(tmp_path: Path) -> None:
    """A stream ends in an error event, a plain answer and a waiter in a 503; the exit code is good all the same."""

    def short(config: dict[str, Any]) -> None:
        config["pools"]["small"]["capacity"] = {"in_flight": 2, "waiting": 4}
        config["drain"] = {"delay": "0s", "timeout": "300ms"}

    async with sim("demo-7b") as (_, port), serve(tmp_path, port, change=short) as gate:
        async with connected(gate.api) as stream, connected(gate.api) as plain, connected(gate.api) as waiter:
            head = await begun(stream, 3000)
            plain.post(chat(max_tokens=3000, ignore_eos=True))
            waiter.post(streaming(3))
            await waiting(gate, 1)
            gate.process.signal(signal.SIGTERM)
            body = (await stream.rest(head)).body
            assert b'"code":"draining"' in body
            assert b"[DONE]" not in body
            for client in (plain, waiter):
                refused = await client.response()
                assert (refused.status, refused.error["code"]) == (503, "draining")
            assert await gate.process.ended() == 0
        load = (await get(port, "/sim/state")).json()
        assert (load["running"], load["waiting"]) == (0, 0)
    calls = [event for event in gate.events() if event["event"] == "call"]
    ends = {(call["reason"], call["outcome"], call["status"]) for call in calls}
    assert ends == {("draining", "shed", 503), ("draining", "failed", 200)}  # the stream had its 200 already


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(tmp_path: Path, second: signal.Signals) -> None:
    async with sim("demo-7b") as (_, port), serve(tmp_path, port) as gate, connected(gate.api) as client:
        await begun(client, 3000)
        gate.process.signal(signal.SIGINT)
        await status_becomes(gate, "/readyz", 503)
        began = asyncio.get_running_loop().time()
        gate.process.signal(second)
        assert await gate.process.ended(2.0) == 1
        assert asyncio.get_running_loop().time() - began < 1.5
    assert "draining" in [event["event"] for event in gate.events()]


async def test_an_idle_gateway_ends_right_after_its_delay(tmp_path: Path) -> None:
    def now(config: dict[str, Any]) -> None:
        config["drain"] = {"delay": "0s", "timeout": "30s"}

    async with sim() as (_, port), serve(tmp_path, port, change=now) as gate, connected(gate.api) as kept:
        kept.post(chat(max_tokens=1))
        assert (await kept.response()).status == 200
        gate.process.signal(signal.SIGTERM)  # the connection that is kept, but idle, keeps nobody
        assert await gate.process.ended(5.0) == 0


async def test_the_demo_takes_its_engines_with_it() -> None:
    async with demo() as (running, _, ops):
        state = (await get(ops, "/admin/state", key="tg-demo-admin")).json()
        ports = [int(each["name"].split(":")[1]) for pool in state["pools"] for each in pool["endpoints"]]
        assert len(ports) == 3
        running.kill()
        await running.ended()

        async def gone() -> bool:
            for port in ports:
                try:
                    await get(port, "/health")
                except OSError:
                    continue
                return False
            return True

        await eventually(gone)
