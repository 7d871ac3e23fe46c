"""Bounds on one call: what is clamped and told, what is refused, and what no second field can slip past."""

from __future__ import annotations

import base64
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.config import Config
from tests.fakes.client import COMPLETIONS, chat, post
from tests.fakes.gateway import LARGE, Engine, Running, always, configured, engine, posted, running, said, tenant
from tests.fakes.upstream import FakeUpstream

CAPS: dict[str, Any] = {"max_tokens": {"default": 256, "limit": 512}, "prompt_tokens": 2000, "n": 4}


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream(always(said())) as upstream:
        yield upstream


def capped(upstream: FakeUpstream, **changes: Any) -> Config:
    return configured([upstream.port], caps=CAPS, **changes)


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}, {"max_tokens": None, "max_completion_tokens": None}])
async def test_no_cap_means_the_default(upstream: FakeUpstream, fields: dict[str, Any]) -> None:
    async with running(capped(upstream)) as gate:
        answer = await post(gate.api, chat(**fields))
        assert answer.status == 200
        assert "x-tiergate-clamped" not in answer.headers
        sent = posted(upstream)[0].json()
        assert {sent[name] for name in ("max_tokens", "max_completion_tokens") if name in sent} == {256}


@pytest.mark.parametrize("asked", [512, 513, 100_000, 2**31 - 1])
async def test_a_cap_over_the_limit_is_lowered_and_told(upstream: FakeUpstream, asked: int) -> None:
    async with running(capped(upstream)) as gate:
        answer = await post(gate.api, chat(max_tokens=asked))
        assert answer.status == 200
        assert answer.headers.get("x-tiergate-clamped") == ("max_tokens=512" if asked > 512 else None)
        assert posted(upstream)[0].json()["max_tokens"] == 512
        assert (await gate.logged())[0]["clamped"] == ("max_tokens=512" if asked > 512 else "")


@pytest.mark.parametrize(
    ("first", "second"), [("max_tokens", "max_completion_tokens"), ("max_completion_tokens", "max_tokens")]
)
async def test_two_caps_in_one_request_count_as_the_larger(upstream: FakeUpstream, first: str, second: str) -> None:
    tight = tenant("tight", limits={"tokens": "100/min"})
    async with running(capped(upstream, tenants=tight)) as gate:
        body = chat(**{first: 1, second: 10_000})
        refused = await post(gate.api, body, key="key-tight")
        assert refused.error["code"] == "request_exceeds_quota"
        assert not posted(upstream)
        assert (await post(gate.api, body)).status == 200
        sent = posted(upstream)[0].json()
        assert max(sent[first], sent[second]) == 512


async def test_a_cap_that_does_not_fit_the_window_is_lowered_to_what_is_left(upstream: FakeUpstream) -> None:
    config = configured([upstream.port], pools={"small": {"window": 1000}})
    async with running(config) as gate:
        answer = await post(gate.api, chat("word " * 200, max_tokens=32_000))
        sent = posted(upstream)[0].json()["max_tokens"]
        assert 1 <= sent <= 1000 - 200
        assert answer.headers["x-tiergate-clamped"] == f"max_tokens={sent}"
        refused = await post(gate.api, chat("word " * 1200, max_tokens=16))
        assert refused.error["code"] == "context_length_exceeded"
        assert len(posted(upstream)) == 1


async def test_what_does_not_fit_the_small_window_goes_to_the_larger(upstream: FakeUpstream) -> None:
    async with engine(LARGE, max_model_len=8000) as large:
        config = configured([upstream.port], [large.port], pools={"small": {"window": 1000}, "large": {"window": 8000}})
        async with running(config) as gate:
            tool = {"type": "function", "function": {"name": "f", "description": "word " * 1200}}
            answer = await post(gate.api, chat("Hello", model="auto", tools=[tool], max_tokens=16))
            assert (answer.status, answer.headers["x-tiergate-tier"]) == (200, "large")
            assert answer.headers["x-tiergate-route"] == "window"
            assert not posted(upstream)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", chat(n=5), "n"),
        (COMPLETIONS, {"model": "small", "prompt": "a", "n": 1, "best_of": 5}, "n"),
        (COMPLETIONS, {"model": "small", "prompt": ["a", "b", "c"], "n": 2}, "prompt"),
        (COMPLETIONS, {"model": "small", "prompt": ["a"] * 5}, "prompt"),
    ],
)
async def test_every_sequence_counts(upstream: FakeUpstream, path: str, body: Any, param: str) -> None:
    async with running(capped(upstream)) as gate:
        refused = await post(gate.api, body, path)
        assert (refused.status, refused.error["code"]) == (400, "too_many_choices")
        assert refused.error["param"] == param
        assert not posted(upstream)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", chat(n=4)),
        (COMPLETIONS, {"model": "small", "prompt": "a", "best_of": 4}),
        (COMPLETIONS, {"model": "small", "prompt": ["a", "b", "c", "d"]}),
    ],
)
async def test_every_sequence_is_held_against_the_quota(upstream: FakeUpstream, path: str, more: Any) -> None:
    """Four times 200 tokens do not fit into 700, once does."""
    async with running(capped(upstream, tenants=tenant("tight", limits={"tokens": "700/min"}))) as gate:
        refused = await post(gate.api, {**more, "max_tokens": 200}, path, key="key-tight")
        assert refused.error["code"] == "request_exceeds_quota"
        fits = await post(gate.api, {**more, "max_tokens": 150}, path, key="key-tight")
        assert fits.status == 200


async def test_an_image_is_not_text(upstream: FakeUpstream) -> None:
    upstream.script = always(said(usage=(1049, 11)))
    url = "data:image/png;base64," + base64.b64encode(random.Random(7).randbytes(1_900_000)).decode()
    content = [{"type": "text", "text": "what is this"}, {"type": "image_url", "image_url": {"url": url}}]
    limits = tenant("seer", limits={"tokens": "50000/day"})
    async with running(configured([upstream.port], caps={"prompt_tokens": 8000}, tenants=limits)) as gate:
        answer = await post(gate.api, chat(content, max_tokens=100), key="key-seer")
        assert answer.status == 200
        record = (await gate.logged())[0]
        assert 300 <= record["prompt_estimate"] <= 4000
        assert record["prompt_tokens"] == 1049
        after = await post(gate.api, chat("hi", max_tokens=1), key="key-seer")
        remaining = int(after.headers["x-ratelimit-remaining-tokens"])
        assert 50_000 - 1049 - 11 - 40 <= remaining < 50_000 - 1049


@pytest.mark.parametrize("text", ["你好" * 4000, "🚀" * 8000, "7" * 8000])
async def test_short_characters_are_many_tokens(upstream: FakeUpstream, text: str) -> None:
    async with running(configured([upstream.port], caps={"prompt_tokens": 4096})) as gate:
        assert (await post(gate.api, chat(text))).error["code"] == "prompt_too_long"


async def test_tools_and_history_count_as_input(upstream: FakeUpstream) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "word " * 3000}}
    history = [{"role": "assistant", "content": "word " * 3000}, {"role": "user", "content": "thanks"}]
    async with running(capped(upstream)) as gate:
        for body in (chat("hi", tools=[tool]), chat(messages=history), chat("word " * 3000)):
            assert (await post(gate.api, body)).error["code"] == "prompt_too_long"
        assert not posted(upstream)


async def test_a_tenants_own_caps_hold(upstream: FakeUpstream) -> None:
    own = tenant("own", caps={"max_tokens": {"default": 8, "limit": 16}, "n": 1})
    async with running(capped(upstream, tenants=own)) as gate:
        await post(gate.api, chat(max_tokens=500), key="key-own")
        await post(gate.api, chat(), key="key-own")
        assert [sent.json()["max_tokens"] for sent in posted(upstream)] == [16, 8]
        assert (await post(gate.api, chat(n=2), key="key-own")).error["code"] == "too_many_choices"


async def test_a_call_of_several_sequences_takes_as_many_slots() -> None:
    async with engine(t0=0.02) as small, running(configured([small.port])) as gate:
        await seen_in_flight(gate, small, choices=4)


async def seen_in_flight(gate: Running, small: Engine, choices: int) -> None:
    answer = await post(gate.api, chat(n=choices, max_tokens=3, ignore_eos=True))
    assert len(answer.json()["choices"]) == choices
    assert small.server.state().finished == choices
    await gate.idle()
