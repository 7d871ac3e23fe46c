"""The demo as a user meets it: one command, then the official client."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.fakes.client import chat, connected, eventually, get, post
from tests.fakes.process import Process
from tests.fakes.process import demo as started

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

EASY = "Translate to French: good morning"
PROOF = "Prove, step by step, that there are infinitely many primes, and explain each lemma."
CODE = "Write a Python function that merges two sorted linked lists, with unit tests."


@dataclass(frozen=True)
class Demo:
    process: Process
    api: int
    ops: int

    def client(self, key: str = "tg-demo-online") -> AsyncOpenAI:
        return AsyncOpenAI(api_key=key, base_url=f"http://127.0.0.1:{self.api}/v1", max_retries=0, timeout=20)

    async def state(self) -> dict[str, Any]:
        state: dict[str, Any] = (await get(self.ops, "/admin/state", key="tg-demo-admin")).json()
        return state

    async def engines(self) -> list[dict[str, Any]]:
        """What the simulated engines say of themselves."""
        names = [endpoint["name"] for pool in (await self.state())["pools"] for endpoint in pool["endpoints"]]
        return [(await get(int(name.rsplit(":", 1)[1]), "/sim/state")).json() for name in names]

    async def load(self) -> int:
        """Sequences that run or wait in any engine."""
        return sum(engine["running"] + engine["waiting"] for engine in await self.engines())

    async def held(self) -> int:
        """Slots taken in the gateway."""
        return sum(sum(pool["in_flight"].values()) for pool in (await self.state())["pools"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def demo() -> AsyncIterator[Demo]:
    async with started() as (running, api, ops):
        yield Demo(running, api, ops)
        running.signal(signal.SIGTERM)
        assert await running.ended() == 0


@pytest.mark.parametrize(("prompt", "tier"), [(EASY, "small"), (PROOF, "large"), (CODE, "large")])
async def test_auto_picks_a_tier_and_says_why(demo: Demo, prompt: str, tier: str) -> None:
    async with demo.client() as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="auto", max_tokens=4, messages=[{"role": "user", "content": prompt}]
        )
    assert raw.headers["x-tiergate-tier"] == raw.headers["x-tiergate-pool"] == tier
    assert raw.headers["x-tiergate-route"].startswith("classifier:")
    assert raw.headers["x-tiergate-release"] == "stable"
    answer = raw.parse()
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


@pytest.mark.parametrize("model", ["small", "large"])
async def test_a_named_tier_is_pinned(demo: Demo, model: str) -> None:
    async with demo.client() as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=model, max_tokens=2, messages=[{"role": "user", "content": EASY}]
        )
    assert (raw.headers["x-tiergate-tier"], raw.headers["x-tiergate-route"]) == (model, "pinned")


@pytest.mark.parametrize("wanted", [True, False, None])
async def test_streams_with_and_without_usage(demo: Demo, wanted: bool | None) -> None:
    options: dict[str, Any] = {} if wanted is None else {"stream_options": {"include_usage": wanted}}
    async with demo.client() as client:
        stream = await client.chat.completions.create(
            model="small", stream=True, max_tokens=6, messages=[{"role": "user", "content": EASY}], **options
        )
        chunks = [chunk async for chunk in stream]
    text = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert len("".join(text).split()) >= 4
    assert any(chunk.choices and chunk.choices[0].finish_reason for chunk in chunks)
    usages = [chunk for chunk in chunks if chunk.usage is not None]
    assert len(usages) == (1 if wanted else 0)
    assert len([chunk for chunk in chunks if not chunk.choices]) == len(usages)
    if wanted:
        assert chunks[-1] is usages[0]
        assert usages[0].usage is not None
        assert usages[0].usage.completion_tokens == 6


async def test_other_calls_of_the_client(demo: Demo) -> None:
    async with demo.client() as client:
        assert [model.id async for model in client.models.list()] == ["auto", "small", "large"]
        assert (await client.models.retrieve("small")).id == "small"
        completion = await client.completions.create(model="small", prompt=["Hello", "there"], max_tokens=3)
        assert len(completion.choices) == 2


async def test_who_may_not(demo: Demo) -> None:
    messages: Any = [{"role": "user", "content": EASY}]
    async with demo.client("tg-demo-small-only") as client:
        with pytest.raises(openai.PermissionDeniedError) as forbidden:
            await client.chat.completions.create(model="large", messages=messages)
        assert forbidden.value.code == "tier_forbidden"
        assert (await client.chat.completions.create(model="auto", messages=messages, max_tokens=2)).choices
        hard: Any = [{"role": "user", "content": PROOF}]
        raw = await client.chat.completions.with_raw_response.create(model="auto", messages=hard, max_tokens=2)
        assert raw.headers["x-tiergate-tier"] == "small"
    async with demo.client("tg-nobody") as client:
        with pytest.raises(openai.AuthenticationError) as unknown:
            await client.chat.completions.create(model="auto", messages=messages)
        assert unknown.value.code == "unauthenticated"
    nobody = await post(demo.api, chat(), key=None)
    assert (nobody.status, nobody.error["code"]) == (401, "unauthenticated")


async def test_an_intern_has_one_call_at_a_time_and_ten_a_minute(demo: Demo) -> None:
    body = chat(stream=True, max_tokens=400, ignore_eos=True)
    async with connected(demo.api) as first:
        first.post(body, key="tg-demo-small-only")
        assert (await first.head()).headers["x-ratelimit-limit-requests"] == "10"
        second = await post(demo.api, body, key="tg-demo-small-only")
        assert (second.status, second.error["code"]) == (429, "tenant_concurrency")
        assert int(second.headers["retry-after"]) >= 1


async def test_too_much_is_refused_or_lowered(demo: Demo) -> None:
    async with demo.client() as client:
        for text in ("word " * 1_800, "x" * 9_000, "word " * 16_384 + "x" * 9_000):
            too_long: Any = [{"role": "user", "content": text}]
            with pytest.raises(openai.BadRequestError) as long:
                await client.chat.completions.create(model="auto", messages=too_long)
            assert (long.value.code, long.value.param) == ("prompt_too_long", "messages")
        async with client.chat.completions.with_streaming_response.create(
            model="small", stream=True, max_tokens=100_000, messages=[{"role": "user", "content": EASY}]
        ) as answer:
            assert answer.headers["x-tiergate-clamped"] == "max_tokens=4096"


async def test_two_caps_in_one_request_cannot_slip_past(demo: Demo) -> None:
    async with connected(demo.api) as client:
        client.post(
            chat(stream=True, max_tokens=1, max_completion_tokens=10_000, user="two-caps"), key="tg-demo-online"
        )
        assert (await client.head()).headers["x-tiergate-clamped"] == "max_tokens=4096"
        asked = [json.loads(request["body"]) for each in await demo.engines() for request in each["requests"]]
        sent = next(body for body in asked if body.get("user") == "two-caps")
        assert max(sent["max_tokens"], sent["max_completion_tokens"]) <= 4096


@pytest.mark.parametrize("moment", ["mid-stream", "before the first token", "plain"])
async def test_a_client_that_is_killed_frees_its_engine(demo: Demo, moment: str) -> None:
    await quiet(demo, within=5)
    async with connected(demo.api) as client:
        stream = moment != "plain"
        client.post(chat(stream=stream, model="large", max_tokens=400, ignore_eos=True), key="tg-demo-online")
        if moment == "mid-stream":
            assert (await client.head()).status == 200
            await client.piece()
        await eventually(partial(runs, demo, 1))
        client.reset()
        await quiet(demo, within=0.5)


async def quiet(demo: Demo, within: float) -> None:
    """Nothing runs or waits in the engines and no slot is taken, within this time."""
    await eventually(partial(runs, demo, 0), within)


async def runs(demo: Demo, count: int) -> bool:
    """Are there just so many sequences in the engines, and as many slots taken?"""
    return await demo.load() == count == await demo.held()


async def test_nothing_but_calls_and_events_was_told(demo: Demo) -> None:
    """Every call is a JSON line on standard error; there is no traceback and no prompt among them."""
    lines = [json.loads(line) for line in demo.process.err]
    assert {line["event"] for line in lines} <= {"started", "call"}
    assert not any("good morning" in line or "tg-demo-online" in line for line in demo.process.err)
