"""Every refusal that can be reached: one word as JSON code, header, log field and metric label, and when to retry."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from gateway.core.refusal import Reason
from tests.fakes.client import Response, chat, connected, exchange, post, request
from tests.fakes.gateway import LARGE, Running, always, configured, engine, held, running, scripted, tenant
from tests.fakes.upstream import FakeUpstream, Peer, Received, RefusedPort, json_response

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Case:
    reason: Reason
    body: Any = field(default_factory=chat)
    key: str | None = "key-acme"
    headers: dict[str, str] = field(default_factory=dict)
    param: str | None = None


LONG = "word " * 3000
CASES = [
    Case(Reason.MALFORMED, body=[]),
    Case(Reason.MALFORMED, body=chat(messages=...), param="messages"),
    Case(Reason.UNSUPPORTED_VALUE, headers={"x_tiergate_band": "gold"}, param="x-tiergate-band"),
    Case(Reason.UNSUPPORTED_VALUE, headers={"x_tiergate_timeout": "soon"}, param="x-tiergate-timeout"),
    Case(Reason.PROMPT_TOO_LONG, body=chat(LONG), param="messages"),
    Case(Reason.MAX_TOKENS_TOO_LARGE, body=chat(max_tokens=5000), key="key-strict", param="max_tokens"),
    Case(Reason.TOO_MANY_CHOICES, body=chat(n=5), param="n"),
    Case(Reason.CONTEXT_LENGTH_EXCEEDED, body=chat("word " * 1200), param="messages"),
    Case(Reason.REQUEST_EXCEEDS_QUOTA, body=chat(max_tokens=200), key="key-tokens", param="max_tokens"),
    Case(Reason.UNAUTHENTICATED, key=None, param="authorization"),
    Case(Reason.UNAUTHENTICATED, key="key-of-nobody", param="authorization"),
    Case(Reason.TIER_FORBIDDEN, body=chat(model="large"), key="key-intern", param="model"),
    Case(Reason.UNKNOWN_MODEL, body=chat(model="gpt-9"), param="model"),
    Case(Reason.BODY_TOO_LARGE, body=chat("word " * 6000)),
    Case(Reason.UNSUPPORTED_MEDIA_TYPE, headers={"content_type": "text/plain"}, param="content-type"),
    Case(Reason.UNSUPPORTED_MEDIA_TYPE, headers={"content_encoding": "gzip"}, param="content-encoding"),
    Case(Reason.TENANT_REQUESTS, key="key-nothing"),
    Case(Reason.TENANT_TOKENS, key="key-tokens", body=chat(max_tokens=60)),
    Case(Reason.TENANT_CONCURRENCY, key="key-idle"),
    Case(Reason.TENANT_BUDGET, key="key-budget", body=chat(max_tokens=60)),
    Case(Reason.UPSTREAM_ERROR, body=chat(model="broken")),
    Case(Reason.UPSTREAM_TIMEOUT, body=chat(model="silent", max_tokens=1)),
    Case(Reason.NO_ENDPOINT, body=chat(model="gone")),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gate() -> AsyncIterator[Running]:
    """A gateway with a pool for every way in which engines fail, and a tenant for every limit."""

    async def silent(peer: Peer, request: Received) -> None:
        await peer.client_left()

    async with AsyncExitStack() as stack:
        small = await stack.enter_async_context(engine())
        large = await stack.enter_async_context(engine(LARGE))
        broken = await stack.enter_async_context(FakeUpstream(always(json_response({"error": {}}, 500))))
        mute = await stack.enter_async_context(FakeUpstream(scripted(silent)))
        gone = stack.enter_context(RefusedPort())
        pools: dict[str, Any] = {
            name: {"tier": name, "model": f"m-{name}", "endpoints": [{"url": url}], "capacity": {"in_flight": 8}}
            for name, url in (("broken", broken.url), ("silent", mute.url), ("gone", gone.url))
        }
        pools["silent"] |= {"timeouts": {"first_token": "50ms"}, "slo": {"inter_token": "1ms"}}
        pools["small"] = {"window": 1024}
        config = configured(
            [small.port],
            [large.port],
            tiers=["small", "large", *("broken", "silent", "gone")],
            pools=pools,
            caps={"prompt_tokens": 2000, "body": "20KiB"},
            health={"eject_after": 1000},
            retry={"attempts": 1},
            tenants={
                **tenant("strict", caps={"max_tokens": {"over": "refuse"}}),
                **tenant("tokens", limits={"tokens": "100/min"}),
                **tenant("budget", limits={"budget": "100/day"}),
                **tenant("nothing", limits={"requests": "0/min"}),
                **tenant("idle", limits={"concurrent": 0}),
            },
        )
        gate = await stack.enter_async_context(running(config))
        for key in ("key-tokens", "key-budget"):  # used up but for a little
            served = await post(gate.api, chat(max_tokens=70, ignore_eos=True), key=key)
            assert served.status == 200
        yield gate


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.reason.code)
async def test_one_word_everywhere(gate: Running, case: Case) -> None:
    before = await gate.metric("requests_total", reason=case.reason.code, outcome=case.reason.outcome.value)
    refused = await post(gate.api, case.body, key=case.key, **case.headers)
    assert refused.headers["content-type"] == "application/json"
    assert_told(refused, case.reason)
    assert refused.error["param"] == case.param
    record = await gate.record(refused.headers["x-request-id"])
    assert (record["reason"], record["status"]) == (case.reason.code, case.reason.status)
    assert record["outcome"] == case.reason.outcome.value
    after = await gate.metric("requests_total", reason=case.reason.code, outcome=case.reason.outcome.value)
    assert after == before + 1


async def test_a_limit_of_nothing_never_says_when_to_come_back(gate: Running) -> None:
    refused = await post(gate.api, chat(), key="key-nothing")
    assert "retry-after" not in refused.headers
    assert refused.headers["x-should-retry"] == "false"


async def test_a_refused_call_never_reaches_an_engine(gate: Running) -> None:
    """The quota case names the waiting time that really helps: tokens flow back at 100 a minute."""
    refused = await post(gate.api, chat(max_tokens=60), key="key-tokens")
    assert 20 <= int(refused.headers["retry-after"]) <= 60 * 1.5


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (request("POST", "/v1/chat/completion", b"{}", "key-acme"), Reason.UNKNOWN_PATH),
        (request("GET", "/", key="key-acme"), Reason.UNKNOWN_PATH),
        (request("GET", "/docs"), Reason.UNKNOWN_PATH),
        (request("GET", "/metrics"), Reason.UNKNOWN_PATH),
        (request("GET", "/admin/state", key="key-admin"), Reason.UNKNOWN_PATH),
        (request("POST", "/sleep", b"{}", "key-acme"), Reason.UNKNOWN_PATH),
        (request("GET", "/v1/chat/completions", key="key-acme"), Reason.METHOD_NOT_ALLOWED),
        (request("PUT", "/v1/chat/completions", b"{}", "key-acme"), Reason.METHOD_NOT_ALLOWED),
        (request("POST", "/v1/models", b"{}", "key-acme"), Reason.METHOD_NOT_ALLOWED),
    ],
)
async def test_what_is_not_here_is_told_in_the_same_shape(gate: Running, raw: bytes, reason: Reason) -> None:
    refused = await exchange(gate.api, raw)
    assert_told(refused, reason)
    if reason is Reason.METHOD_NOT_ALLOWED:
        assert refused.headers["allow"]


async def test_a_body_that_does_not_come() -> None:
    async with engine() as small, running(configured([small.port], timeouts={"body": "100ms"})) as gate:
        raw = request("POST", "/v1/chat/completions", b'{"model": "small"', "key-acme", content_length="500")
        refused = await exchange(gate.api, raw)
        assert_told(refused, Reason.BODY_TIMEOUT)
        assert refused.headers["connection"] == "close"
        assert (await gate.logged())[0]["reason"] == "body_timeout"


# -- refusals of a pool that is full ------------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="module")
async def tight() -> AsyncIterator[Running]:
    """One slot, two places in line, an engine that needs a minute for a long answer."""
    async with engine(t0=0.02) as small:
        config = configured(
            [small.port],
            pools={"small": {"capacity": {"in_flight": 1, "waiting": 2}, "slo": {"first_token": "30s"}}},
            queue={"online": {"timeout": "30s"}, "batch": {"limit": 1}},
            tenants=tenant("beta"),
        )
        async with running(config) as gate:
            yield gate


async def test_the_line_is_full(tight: Running) -> None:
    async with held(tight), waiting(tight, "key-acme", "key-acme"):
        refused = await post(tight.api, chat())
        await assert_shed(tight, refused, Reason.PAST_KNEE)
        assert int(refused.headers["retry-after"]) >= 1


async def test_more_than_the_fair_share_of_the_line(tight: Running) -> None:
    async with held(tight), waiting(tight, "key-acme", "key-acme", "key-beta"):
        await assert_shed(tight, await post(tight.api, chat()), Reason.FAIR_SHARE)


async def test_the_batch_line_is_full(tight: Running) -> None:
    async with held(tight), waiting(tight, "key-bulk"):
        await assert_shed(tight, await post(tight.api, chat(), key="key-bulk"), Reason.PAST_KNEE)


async def test_a_first_token_that_cannot_come_in_time(tight: Running) -> None:
    for _ in range(6):  # from these the gateway learns how fast slots come free: once in 200 ms
        assert (await post(tight.api, chat(max_tokens=10, ignore_eos=True))).status == 200
    async with held(tight):
        refused = await post(tight.api, chat(), x_tiergate_timeout="0.05")
        await assert_shed(tight, refused, Reason.DEADLINE_UNREACHABLE)


async def test_a_caller_waits_no_longer_than_it_said(tight: Running) -> None:
    async with held(tight):
        began = asyncio.get_running_loop().time()
        refused = await post(tight.api, chat(), x_tiergate_timeout="0.2")
        assert 0.15 <= asyncio.get_running_loop().time() - began <= 1.0
        await assert_shed(tight, refused, Reason.QUEUE_TIMEOUT)


async def test_a_gateway_that_ends(tight: Running) -> None:
    async with held(tight):
        draining = asyncio.create_task(tight.gateway.drain())
        await asyncio.sleep(0)
        async with asyncio.timeout(1):  # at once, and not when the time to drain is over
            refused = await post(tight.api, chat())
        await assert_shed(tight, refused, Reason.DRAINING)
        assert refused.headers["connection"] == "close"
    await draining


@asynccontextmanager
async def waiting(gate: Running, *keys: str) -> AsyncIterator[None]:
    """Callers, one for each key, that stand in line until the end of the block."""
    async with AsyncExitStack() as stack:
        for number, key in enumerate(keys, 1):
            client = await stack.enter_async_context(connected(gate.api))
            client.post(chat(), key=key)
            await gate.waits(number, "online", "batch")
        yield
    await gate.waits(0, "online", "batch")


async def assert_shed(gate: Running, refused: Response, reason: Reason) -> None:
    assert_told(refused, reason)
    record = await gate.record(refused.headers["x-request-id"])
    assert (record["reason"], record["outcome"]) == (reason.code, reason.outcome.value)
    assert refused.headers["x-tiergate-pool"] == record["pool"] == "small"


def assert_told(refused: Response, reason: Reason) -> None:
    """Status, code, header and type agree; retry headers are whole numbers, or say that a retry cannot help."""
    assert refused.status == reason.status, refused
    assert refused.error["code"] == refused.headers["x-tiergate-reason"] == reason.code
    assert refused.error["type"] == reason.kind
    assert len(refused.error["message"]) > 10
    assert "Traceback" not in refused.body.decode()
    if "retry-after" in refused.headers:
        seconds, milliseconds = int(refused.headers["retry-after"]), int(refused.headers["retry-after-ms"])
        assert seconds == math.ceil(milliseconds / 1000) >= 1
        assert reason.retryable
    else:
        assert refused.headers["x-should-retry"] == "false"
        assert "retry-after-ms" not in refused.headers
