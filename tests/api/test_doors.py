"""Who may come in and by which door: paths, keys, request ids, the list of models, health."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.fakes.client import CHAT, Response, chat, connected, eventually, exchange, get, post, request
from tests.fakes.gateway import LARGE, Running, always, configured, engine, posted, running, said, tenant
from tests.fakes.upstream import FakeUpstream, RefusedPort, until

BODY = json.dumps(chat()).encode()


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house() -> AsyncIterator[tuple[FakeUpstream, Running]]:
    limits = tenant("once", limits={"requests": "1/day"})
    keyed = {"small": {"api_key": "engine-key-1234"}}
    async with (
        FakeUpstream(always(said())) as upstream,
        running(configured([upstream.port], tenants=limits, pools=keyed)) as gate,
    ):
        yield upstream, gate


@pytest.fixture
def upstream(house: tuple[FakeUpstream, Running]) -> FakeUpstream:
    """The engine of the gateway that these tests share; it remembers only this test's calls."""
    for peer in house[0].peers:
        peer.requests.clear()
    return house[0]


@pytest.fixture
def gate(house: tuple[FakeUpstream, Running]) -> Running:
    return house[1]


# -- paths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions/",
        "/chat/completions",
        "/v1/v1/chat/completions",
        "//v1/chat/completions",
        "/V1/chat/completions",
        "/v1/chat/completions;x",
        "/v1/chat//completions",
        "/v1/../v1/chat/completions",
    ],
)
async def test_paths_match_exactly_and_nothing_is_redirected(gate: Running, upstream: FakeUpstream, path: str) -> None:
    refused = await exchange(gate.api, request("POST", path, BODY, "key-acme"))
    assert (refused.status, refused.error["code"]) == (404, "unknown_path")
    assert "/v1" in refused.error["message"]
    assert "location" not in refused.headers
    assert not posted(upstream)


@pytest.mark.parametrize("path", ["/v1/%63hat/completions", "http://g/v1/chat/completions", CHAT, CHAT + "?a=b"])
async def test_another_spelling_of_a_path_has_all_the_limits(gate: Running, upstream: FakeUpstream, path: str) -> None:
    """Served or not there: what is served is limited."""
    await post(gate.api, chat(), key="key-once")
    served = len(posted(upstream))
    answer = await exchange(gate.api, request("POST", path, BODY, "key-once", x_http_method_override="GET"))
    assert answer.error["code"] in ("tenant_requests", "unknown_path")
    assert (await exchange(gate.api, request("POST", path, BODY))).status in (401, 404)
    assert len(posted(upstream)) == served


# -- keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer key-acme"},
        {"authorization": "bearer  key-acme "},
        {"x_api_key": "key-acme"},
        {"authorization": "Basic a2V5OmtleQ==", "x_api_key": "key-acme"},
    ],
)
async def test_a_key_in_either_header_opens(gate: Running, headers: dict[str, str]) -> None:
    assert (await post(gate.api, chat(), key=None, **headers)).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer "},
        {"authorization": "key-acme"},
        {"authorization": "Bearer key-acmE"},
        {"authorization": "Bearer key-admin"},
        {"authorization": "Bearer wrong", "x_api_key": "key-acme"},
        {"x_api_key": "\xe9\xff"},
        {"x_api_key": "k" * 5000},
        {"api_key": "key-acme"},
        {"cookie": "key=key-acme"},
    ],
)
async def test_any_other_key_does_not(gate: Running, upstream: FakeUpstream, headers: dict[str, str]) -> None:
    refused = await post(gate.api, b"not even JSON", key=None, **headers)
    assert (refused.status, refused.error["code"]) == (401, "unauthenticated")
    assert not posted(upstream)
    record = await gate.record(refused.headers["x-request-id"])
    assert (record["tenant"], record["reason"]) == ("", "unauthenticated")


async def test_the_callers_key_and_headers_stay_here(gate: Running, upstream: FakeUpstream) -> None:
    secrets = {"x_api_key": "key-bulk", "api_key": "key-acme", "cookie": "s=key-acme", "openai_organization": "org"}
    assert (await post(gate.api, chat(), **secrets, user_agent="agent/1")).status == 200
    sent = posted(upstream)[0]
    assert sent.headers["authorization"] == "Bearer engine-key-1234"
    assert set(sent.headers) <= {
        "host", "authorization", "content-type", "content-length", "x-request-id", "accept-encoding",
    }  # fmt: skip
    for secret in (b"key-acme", b"key-bulk", b"org", b"agent"):
        assert secret not in sent.head


async def test_without_a_key_of_its_own_the_pool_sends_none(upstream: FakeUpstream) -> None:
    async with running(configured([upstream.port])) as gate:
        assert (await post(gate.api, chat())).status == 200
        assert "authorization" not in posted(upstream)[0].headers


# -- request ids --------------------------------------------------------------------------------------------------


async def test_a_harmless_request_id_is_kept_everywhere(gate: Running, upstream: FakeUpstream) -> None:
    answer = await post(gate.api, chat(), x_request_id="run-7.A_b")
    assert answer.headers["x-request-id"] == "run-7.A_b"
    assert posted(upstream)[0].headers["x-request-id"] == "run-7.A_b"
    assert (await gate.record("run-7.A_b"))["status"] == 200


@pytest.mark.parametrize("given", ["x\x85level=error fake", "a" * 10_000, "a b", "é", '{"a":1}', "x,y"])
async def test_any_other_request_id_is_replaced(gate: Running, given: str) -> None:
    """And a forged line in the model's name stays inside its log field."""
    answer = await post(gate.api, chat(model='m\r\nX: y\x1b[31m"'), x_request_id=given)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", answer.headers["x-request-id"])
    assert answer.headers["x-request-id"] != given
    assert "x" not in answer.headers
    assert (await gate.record(answer.headers["x-request-id"]))["reason"] == "unknown_model"
    text = gate.text.getvalue()
    assert given not in text
    assert "\x1b" not in text
    assert text.count("\n") == len(gate.lines())


async def test_the_same_id_twice_at_once_is_two_calls(gate: Running, upstream: FakeUpstream) -> None:
    answers = await asyncio.gather(*(post(gate.api, chat(), x_request_id="twin") for _ in range(10)))
    assert {answer.status for answer in answers} == {200}
    assert len(posted(upstream)) == 10
    await gate.idle()
    await until(lambda: sum(record["id"] == "twin" for record in gate.calls()) == 10)


# -- models -------------------------------------------------------------------------------------------------------


async def test_models_are_those_the_tenant_may_use() -> None:
    async with engine() as small, engine(LARGE) as large:
        config = configured([small.port], [large.port], pools={"large": {"window": 9000}})
        async with running(config) as gate:
            assert ids(await get(gate.api, "/v1/models", "key-acme")) == ["auto", "small", "large"]
            assert ids(await get(gate.api, "/v1/models", "key-intern")) == ["auto", "small"]
            one = await get(gate.api, "/v1/models/large", "key-acme")
            assert one.json()["max_model_len"] == 9000
            hidden = await get(gate.api, "/v1/models/large", "key-intern")
            assert (hidden.status, hidden.error["code"]) == (404, "unknown_model")
            assert (await get(gate.api, "/v1/models")).error["code"] == "unauthenticated"


async def test_models_are_told_without_asking_a_dead_engine() -> None:
    with RefusedPort() as gone:
        async with running(configured([gone.port])) as gate:
            answer = await get(gate.api, "/v1/models", "key-acme")
            assert ids(answer) == ["auto", "small"]
            assert str(gone.port) not in answer.body.decode()


# -- health -------------------------------------------------------------------------------------------------------


async def test_alive_and_ready(gate: Running) -> None:
    for path in ("/health", "/livez", "/readyz"):
        assert (await get(gate.api, path)).status == 200
    assert (await get(gate.ops, "/livez")).status == 200
    async with connected(gate.api) as client:
        client.send(request("HEAD", "/readyz"))
        assert (await client.head()).status == 200


async def test_not_ready_without_an_engine() -> None:
    with RefusedPort() as gone, RefusedPort() as also:
        config = configured([gone.port, also.port], health={"interval": "20ms", "eject_after": 1})
        async with running(config) as gate:
            for _ in range(2):
                assert (await post(gate.api, chat())).status == 503
            assert (await get(gate.api, "/readyz")).status == 503
            assert (await get(gate.api, "/livez")).status == 200


async def test_not_ready_before_a_call_had_to_fail() -> None:
    """Probes alone tell that nobody answers, though they never take the last endpoint out of use."""
    with RefusedPort() as gone:
        config = configured([gone.port], health={"interval": "20ms", "eject_after": 3})
        async with running(config) as gate:

            async def not_ready() -> bool:
                return (await get(gate.api, "/readyz")).status == 503

            await eventually(not_ready)
            assert (await gate.state())["pools"][0]["endpoints"][0]["state"] == "up"
            assert await gate.metric("endpoint_up") == 0


async def test_not_ready_while_draining(upstream: FakeUpstream) -> None:
    async with running(configured([upstream.port])) as gate, connected(gate.api) as client:
        client.send(request("POST", CHAT, b'{"model"', "key-acme", content_length="900"))
        # An answer on a later connection says that the earlier one was read.
        assert (await get(gate.api, "/livez")).status == 200
        draining = asyncio.create_task(gate.gateway.drain())
        await asyncio.sleep(0)
        assert (await get(gate.api, "/readyz")).status == 503
        assert (await get(gate.api, "/livez")).status == 200
        assert await gate.metric("draining") == 1
        await client.close()
        await draining


def ids(answer: Response) -> list[str]:
    assert answer.status == 200, answer
    return [row["id"] for row in answer.json()["data"]]
