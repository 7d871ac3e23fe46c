"""The simulated engine's bytes against recordings of a real vLLM 0.32."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.sim.client import Connect, Response, Start, chat, get, post, send

FIXTURES = Path(__file__).parent / "fixtures"


def request(name: str) -> bytes:
    return (FIXTURES / f"{name}.req.txt").read_bytes()


def recorded(name: str) -> Response:
    """A recorded answer, its chunked coding undone."""
    head, _, body = (FIXTURES / f"{name}.resp.txt").read_bytes().partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    response = Response(int(lines[0].split(" ")[1]), dict(line.split(": ", 1) for line in lines[1:]))
    if response.headers.get("transfer-encoding") == "chunked":
        while body:
            size, _, body = body.partition(b"\r\n")
            response.body += body[: int(size, 16)]
            body = body[int(size, 16) + 2 :]
    else:
        response.body = body
    return response


def shape(value: Any) -> Any:
    """Keys in order and kinds of values."""
    if isinstance(value, dict):
        return [(key, shape(each)) for key, each in value.items()]
    if isinstance(value, list):
        return [shape(each) for each in value]
    return type(value).__name__


def header_names(response: Response) -> set[str]:
    # The recorded server ran with --enable-request-id-headers.
    return set(response.headers) - {"x-request-id"}


SAME_BYTES = sorted(
    path.name.removesuffix(".req.txt")
    for pattern in ("err_*.req.txt", "meta_*.req.txt", "chat_priority_string.req.txt", "tokenize_*.req.txt")
    for path in FIXTURES.glob(pattern)
    if path.name != "meta_7b_v1_models.req.txt"
)


@pytest.mark.parametrize("name", SAME_BYTES)
async def test_errors_and_operations_answer_in_the_same_bytes(start: Start, connect: Connect, name: str) -> None:
    _, port = await start()
    expected = recorded(name)
    if name == "meta_head_health":  # the answer to HEAD has no body; its length is that of GET's
        client = await connect(port)
        client.writer.write(request(name))
        got = await client.head()
        await client.close()
    else:
        got = await send(port, request(name))
    assert (got.status, got.body) == (expected.status, expected.body)
    assert header_names(got) == header_names(expected)
    assert got.headers.get("content-type") == expected.headers.get("content-type")


@pytest.mark.parametrize("name", ["chat_basic", "comp_basic", "chat_n2", "comp_prompt_list", "comp_default_max_tokens"])
async def test_whole_answers_have_the_same_shape(start: Start, name: str) -> None:
    _, port = await start()
    got, expected = await send(port, request(name)), recorded(name)
    assert got.status == 200 and header_names(got) == header_names(expected)
    assert shape(got.json()) == shape(expected.json())
    for ours, theirs in zip(got.json()["choices"], expected.json()["choices"], strict=True):
        assert (ours["index"], ours["finish_reason"]) == (theirs["index"], theirs["finish_reason"])
    assert got.json()["usage"]["completion_tokens"] == expected.json()["usage"]["completion_tokens"]
    assert got.json()["object"] == expected.json()["object"]


STREAMS = [
    "chat_stream",
    "chat_stream_usage",
    "chat_stream_usage_continuous",
    "chat_stream_continuous_only",
    "chat_n2_stream",
    "comp_stream",
    "comp_stream_usage_continuous",
    "comp_prompt_list_stream",
]


@pytest.mark.parametrize("name", STREAMS)
async def test_streams_have_the_same_events(start: Start, name: str) -> None:
    _, port = await start()
    got, expected = await send(port, request(name)), recorded(name)
    assert got.status == 200 and header_names(got) == header_names(expected)
    assert got.headers["content-type"] == expected.headers["content-type"]

    def kinds(response: Response, index: int) -> list[Any]:
        """Shapes of one sequence's events in order; vLLM may put two tokens in one event, so runs count once."""
        shapes = [shape(each) for each in response.chunks() if (each["choices"] or [{"index": 9}])[0]["index"] == index]
        return [key for key, _ in groupby(shapes)]

    for index in (0, 1, 9):  # 9: the usage event, which has no choices
        assert kinds(got, index) == kinds(expected, index)
    ours, theirs = got.chunks(), expected.chunks()
    assert ours[-1]["object"] == theirs[-1]["object"]
    if "usage" in theirs[-1]:
        mine, real = ours[-1]["usage"], theirs[-1]["usage"]
        assert mine["completion_tokens"] == real["completion_tokens"]
        assert mine["total_tokens"] == mine["prompt_tokens"] + mine["completion_tokens"]


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"n": ' + b"1" * 5000 + b"}", b'{"model": "\\ud800", "messages": []}']
)
async def test_a_hostile_body_gets_an_answer(start: Start, body: bytes) -> None:
    _, port = await start()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    assert (await send(port, head.encode() + body)).status in {400, 404}


async def test_each_event_is_one_http_chunk(start: Start, connect: Connect) -> None:
    _, port = await start()
    client = await connect(port)
    client.post("/v1/chat/completions", chat(stream=True, max_tokens=3, ignore_eos=True))
    await client.head()
    pieces = [piece async for piece in client.pieces()]
    assert len(pieces) == 5
    assert all(piece.startswith(b"data: ") and piece.endswith(b"\n\n") and piece.count(b"\n") == 2 for piece in pieces)


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("queue_full_503_nonstream", {"max_queued_reqs": 0}),
        ("queue_full_503_stream", {"max_queued_reqs": 0}),
        ("queue_full_completions_list", {"max_queued_reqs": 1}),
        ("queue_tokens_full_503_nonstream", {"max_queued_tokens": 0}),
    ],
)
async def test_its_own_limits_answer_like_the_real_ones(start: Start, name: str, limits: dict[str, int]) -> None:
    _, port = await start(**limits)
    got, expected = await send(port, request(name)), recorded(name)
    assert (got.status, got.body, header_names(got)) == (expected.status, expected.body, header_names(expected))
    label = "max_num_queued_tokens" if "tokens" in name else "max_num_queued_reqs"
    assert f'reason="{label}"}} 1.0' in (await get(port, "/metrics")).body.decode()


async def test_the_model_list_has_the_same_shape(start: Start) -> None:
    _, port = await start()
    got = await get(port, "/v1/models")
    assert shape(got.json()) == shape(recorded("meta_7b_v1_models").json())
    assert got.json()["data"][0]["max_model_len"] == 2048


async def test_max_tokens_is_clamped_to_the_window_and_its_default_is_the_rest_of_it(start: Start) -> None:
    _, port = await start(max_model_len=64)
    for fields in ({"max_tokens": 64}, {}, {"max_tokens": None}, {"max_tokens": 5, "max_completion_tokens": 60}):
        answer = (await post(port, "/v1/chat/completions", chat(ignore_eos=True, **fields))).json()
        assert answer["usage"]["total_tokens"] == 64, fields
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_prompt_that_fills_the_window_gets_no_token_and_one_more_is_refused(start: Start) -> None:
    _, port = await start(max_model_len=16)
    full = await post(port, "/v1/completions", {"prompt": "x" * 64, "max_tokens": 5})
    assert full.status == 200
    assert full.json()["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 16, "total_tokens": 16, "completion_tokens": 0, "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }  # fmt: skip
    assert full.json()["choices"][0]["text"] == ""
    assert (await post(port, "/v1/completions", {"prompt": "x" * 65})).status == 400


async def test_prompt_sizes_are_estimated_by_characters(start: Start) -> None:
    _, port = await start()

    async def size(path: str, **fields: object) -> int:
        answer = (await post(port, path, {"max_tokens": 1, **fields})).json()
        return int(answer["usage"]["prompt_tokens"])

    user = {"role": "user", "content": "x" * 40}
    assert await size("/v1/chat/completions", messages=[user]) == 10 + 4 + 1
    assert await size("/v1/chat/completions", messages=[user, user]) == 20 + 8 + 1
    parts = [{"type": "text", "text": "x" * 40}, {"type": "image_url", "image_url": {"url": "data:"}}]
    assert await size("/v1/chat/completions", messages=[{"role": "user", "content": parts}]) == 10 + 256 + 4 + 1
    assert await size("/v1/completions", prompt="x" * 41) == 11
    assert await size("/v1/completions", prompt=[1, 2, 3]) == 3
    assert await size("/v1/completions", prompt=[[1, 2, 3], [4]]) == 4
    assert (await post(port, "/tokenize", {"messages": [user]})).json()["count"] == 15


async def test_lengths_vary_by_request_and_never_pass_the_limit(start: Start) -> None:
    _, port = await start()
    answers = [(await post(port, "/v1/chat/completions", chat(max_tokens=100, seed=seed))).json() for seed in range(12)]
    lengths = [answer["usage"]["completion_tokens"] for answer in answers]
    reasons = {answer["choices"][0]["finish_reason"] for answer in answers}
    assert max(lengths) == 100 and min(lengths) < 100
    assert reasons == {"length", "stop"}
    for answer in answers:
        words = len(answer["choices"][0]["message"]["content"].split())
        silent = answer["choices"][0]["finish_reason"] == "stop"  # the end-of-text token counts and says nothing
        assert words == answer["usage"]["completion_tokens"] - silent


async def test_the_same_seed_says_the_same(start: Start) -> None:
    (_, one), (_, same), (_, other) = await start(seed=1), await start(seed=1), await start(seed=2)

    async def said(port: int, **fields: object) -> str:
        answer = (await post(port, "/v1/chat/completions", chat(max_tokens=50, **fields))).json()
        return str(answer["choices"][0]["message"]["content"])

    assert await said(one) == await said(same) != await said(other)
    assert await said(one, seed=7) == await said(other, seed=7)


async def test_streamed_and_whole_text_agree(start: Start) -> None:
    _, port = await start()
    for fields in ({"max_tokens": 9}, {"max_tokens": 1000}):
        whole = (await post(port, "/v1/chat/completions", chat(seed=3, **fields))).json()
        events = (await post(port, "/v1/chat/completions", chat(seed=3, stream=True, **fields))).chunks()
        text = "".join(event["choices"][0]["delta"]["content"] for event in events)
        assert text == whole["choices"][0]["message"]["content"]
        assert events[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


async def test_the_request_id_becomes_part_of_the_answers_id(start: Start) -> None:
    _, port = await start()
    answer = await post(port, "/v1/chat/completions", chat(max_tokens=1), X_Request_Id='a"b')
    assert answer.json()["id"] == 'chatcmpl-a"b'
    events = (await post(port, "/v1/completions", {"prompt": "x", "stream": True}, x_request_id="me")).chunks()
    assert {event["id"] for event in events} == {"cmpl-me"}
    first, second = [(await post(port, "/v1/chat/completions", chat(max_tokens=1))).json()["id"] for _ in range(2)]
    assert first != second


async def test_the_load_header_comes_on_demand_and_only_on_whole_answers(start: Start) -> None:
    _, port = await start()
    path, name = "/v1/chat/completions", "endpoint-load-metrics"
    as_json = (await post(port, path, chat(max_tokens=1), endpoint_load_metrics_format="json")).headers[name]
    assert set(json.loads(as_json.removeprefix("JSON "))["named_metrics"]) == {
        "num_requests_waiting",
        "kv_cache_usage_perc",
    }
    as_text = (await post(port, path, chat(max_tokens=1), endpoint_load_metrics_format="text")).headers[name]
    assert as_text == "TEXT named_metrics.num_requests_waiting=0.0, named_metrics.kv_cache_usage_perc=0.0"
    assert name not in (await post(port, path, chat(max_tokens=1))).headers
    streamed = await post(port, path, chat(max_tokens=1, stream=True), endpoint_load_metrics_format="json")
    assert name not in streamed.headers


async def test_metrics_count_what_was_served(start: Start) -> None:
    _, port = await start()
    for fields in ({"max_tokens": 5, "ignore_eos": True}, {"max_tokens": 1, "n": 2}):
        await post(port, "/v1/chat/completions", chat(**fields))
    response = await get(port, "/metrics")
    assert response.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
    samples = {}
    for family in text_string_to_metric_families(response.body.decode()):
        for sample in family.samples:
            assert (sample.labels["engine"], sample.labels["model_name"]) == ("0", "tiny-7b")
            extra = {key: value for key, value in sample.labels.items() if key not in {"engine", "model_name"}}
            samples[(sample.name.removeprefix("vllm:"), *extra.values())] = sample.value
    assert samples["num_requests_running",] == samples["num_requests_waiting",] == samples["kv_cache_usage_perc",] == 0
    assert samples["num_requests_waiting_by_reason", "capacity"] == 0
    assert samples["generation_tokens_total",] == 7
    assert samples["prompt_tokens_total",] == 3 * 10
    assert samples["request_success_total", "length"] == 3
    assert samples["request_success_total", "abort"] == 0
    assert samples["time_to_first_token_seconds_count",] == samples["e2e_request_latency_seconds_count",] == 3
    assert samples["inter_token_latency_seconds_count",] == 4
    assert samples["request_queue_time_seconds_bucket", "+Inf"] == 3
    assert samples["time_to_first_token_seconds_bucket", "2560.0"] == 3
    assert samples["num_preemptions_total",] == 0
    shape_of_cache = next(key for key in samples if key[0] == "cache_config_info")
    assert shape_of_cache[1] == "16" and shape_of_cache[-1] == "4096"
