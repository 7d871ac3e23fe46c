"""What operators get: metrics with bounded labels, live state behind a key, one log line a call without secrets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.client import chat, connected, exchange, get, post, request
from tests.fakes.gateway import Running, always, configured, engine, running, said
from tests.fakes.upstream import FakeUpstream, until

SECRET = "the launch code is marzipan-4711"


@pytest.fixture
async def gate() -> AsyncIterator[Running]:
    async with engine() as small, running(configured([small.port])) as gate:
        yield gate


async def test_the_product_metrics_are_there_and_parse(gate: Running) -> None:
    await post(gate.api, chat(max_tokens=3, stream=True, stream_options={"include_usage": True}))
    await post(gate.api, chat(max_tokens=3, model="auto"))
    await gate.logged(2)
    answer = await get(gate.ops, "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name for family in text_string_to_metric_families(answer.body.decode())}
    for name in (
        "requests in_flight waiting limit knee_in_flight knee_waiting limit_factor saturation wait_seconds "
        "first_token_seconds inter_token_seconds forecast_first_token_seconds tokens route endpoint_up "
        "endpoint_in_flight overhead_seconds store_up canary_requests config_version"
    ).split():
        assert f"tiergate_{name}" in families
    assert await gate.metric("requests_total", tenant="acme", pool="small", outcome="ok", reason="") == 2
    assert await gate.metric("tokens_total", tenant="acme", pool="small", kind="completion") == 6
    assert await gate.metric("route_total", route="auto", tier="small", why="classifier") == 1
    assert await gate.metric("first_token_seconds_count", pool="small", band="online") == 1
    assert await gate.metric("overhead_seconds_count") == 2


async def test_callers_cannot_make_series() -> None:
    async with FakeUpstream(always(said())) as upstream, running(configured([upstream.port])) as gate:
        await strangers(gate, 0, 30)
        before = set(await gate.metrics())
        await strangers(gate, 1000, 300)
        assert set(await gate.metrics()) == before
        text = (await get(gate.ops, "/metrics")).body.decode()
        for told in ("model-1", "user-1", "id-1", "key-1"):
            assert told not in text


async def strangers(gate: Running, first: int, count: int) -> None:
    """Calls with names that nobody configured, most of them refused."""
    async with connected(gate.api) as client:
        for number in range(first, first + count):
            model = "small" if number % 3 == 0 else f"model-{number}"
            key = f"key-{number}" if number % 5 == 0 else "key-acme"
            client.post(chat(model=model, user=f"user-{number}"), key=key, x_request_id=f"id-{number}")
            await client.response()


async def test_live_state_needs_an_admin_key(gate: Running) -> None:
    for key in (None, "key-acme", "wrong"):
        refused = await get(gate.ops, "/admin/state", key=key)
        assert (refused.status, refused.error["code"]) == (401, "unauthenticated")
    state = await gate.state()
    assert set(state["tenants"]) == {"acme", "bulk", "intern"}
    assert [pool["name"] for pool in state["pools"]] == ["small"]
    assert (await get(gate.ops, "/admin/state", x_api_key="key-admin")).status == 200
    assert (await get(gate.ops, "/v1/models", key="key-acme")).status == 404


async def test_the_engines_own_figures_show_up(gate: Running) -> None:
    await until(lambda: gate.gateway.snapshot().pools[0].endpoints[0].window is not None)
    await until(lambda: gate.gateway.snapshot().pools[0].endpoints[0].running is not None)
    endpoint = (await gate.pool())["endpoints"][0]
    assert (endpoint["running"], endpoint["waiting"], endpoint["window"]) == (0.0, 0.0, 4096)
    assert not endpoint["stale"]


async def test_one_line_a_call_without_prompt_or_key(gate: Running) -> None:
    said_back = chat(SECRET, max_tokens=2, user="user-77")
    calls = [
        request("POST", "/v1/chat/completions", json.dumps(body).encode(), key)
        for body, key in (
            (said_back, "key-acme"),
            ({**said_back, "stream": True}, "key-acme"),
            ({**said_back, "model": "nope"}, "key-acme"),
            ({**said_back, "max_tokens": SECRET}, "key-acme"),
            ({**said_back, "tools": SECRET}, "key-acme"),
            (said_back, "key-with-a-secret-4712"),
        )
    ]
    calls.append(request("POST", "/v1/chat/completions", f'{{"messages": "{SECRET}"'.encode(), "key-acme"))
    answers = [await exchange(gate.api, raw) for raw in calls]
    assert [answer.status for answer in answers] == [200, 200, 404, 400, 400, 401, 400]
    records = await gate.logged(len(calls))
    assert [record["id"] for record in records] == [answer.headers["x-request-id"] for answer in answers]
    for secret in ("marzipan", "4711", "4712", "key-acme", "user-77"):
        assert secret not in gate.text.getvalue()
        for answer in answers[2:]:
            assert secret not in answer.body.decode() + str(answer.headers)


async def test_a_line_tells_where_a_call_went(gate: Running) -> None:
    answer = await post(gate.api, chat(model="auto", max_tokens=4, ignore_eos=True, stream=True))
    record = await gate.record(answer.headers["x-request-id"])
    told = {name: record[name] for name in ("tenant", "band", "model", "route", "tier", "pool", "stream", "outcome")}
    assert told == {
        "tenant": "acme", "band": "online", "model": "auto", "route": "auto", "tier": "small", "pool": "small",
        "stream": True, "outcome": "ok",
    }  # fmt: skip
    assert (record["status"], record["attempts"], record["completion_tokens"]) == (200, 1, 4)
    assert record["why"].startswith("classifier:")
    assert answer.headers["x-tiergate-route"] == record["why"]
    assert 0 < record["first_token"] <= record["duration"]
    assert record["overhead"] < 0.1
