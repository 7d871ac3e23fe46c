"""The body an engine gets: what the gateway decides is set, all else is as the caller wrote it, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.rewrite import engine_body
from tests.core.making import a_call

OURS = ("model", "max_tokens", "max_completion_tokens", "stream_options", "priority")
STRIPPED = ("priority", "kv_transfer_params", "ec_transfer_params", "vllm_xargs")


def rewritten(
    fields: Mapping[str, bytes], *, stream: bool = False, max_tokens: int = 64, priority: int | None = None
) -> dict[str, object]:
    body = engine_body(a_call(fields=fields, stream=stream, max_tokens=max_tokens), "Qwen-7B", priority)
    found = json.loads(body, object_pairs_hook=list)
    names = [name for name, _ in found]
    assert len(names) == len(set(names))
    return dict(json.loads(body))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("temperature", b"0.10000000000000000555"),
        ("seed", b"12345678901234567890123"),
        ("top_p", b"1E-2"),
        ("guided_json", b'{ "type" : "object",\n "a": [1, 2.50] }'),
        ("x_new_2027", b'[1,{"a":null}]'),
        ("user", b'"\\ud83d \\u00e9 \\/"'),
        ("stop", '"é😀"'.encode()),
    ],
)
def test_what_is_not_ours_passes_byte_for_byte(name: str, text: bytes) -> None:
    """RT-13: numbers keep their digits, texts their escapes, objects their blanks."""
    body = engine_body(a_call(fields={"model": b'"auto"', name: text, "messages": b"[ ]"}), "Qwen-7B", None)
    assert body == b'{"model":"Qwen-7B","%b":%b,"messages":[ ],"max_tokens":50}' % (name.encode(), text)


@pytest.mark.parametrize("name", ["", "with space", 'quo"te', "back\\slash", "new\nline", "é", "😀", "\ud800", "a.b"])
def test_odd_names_stay_the_same_names(name: str) -> None:
    assert rewritten({name: b"1"})[name] == 1


@given(
    st.dictionaries(
        st.text(max_size=10).filter(lambda name: name not in OURS + STRIPPED),
        st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8), st.lists, max_leaves=5),
        max_size=8,
    )
)
def test_any_members_arrive_as_they_were(members: dict[str, object]) -> None:
    fields = {name: json.dumps(value).encode() for name, value in members.items()}
    body = rewritten({"model": b'"auto"'} | fields)
    assert {name: value for name, value in body.items() if name not in OURS} == members


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"max_tokens": 64}),
        ({"max_tokens": b"null"}, {"max_tokens": 64}),
        ({"max_tokens": b"100000"}, {"max_tokens": 64}),
        ({"max_tokens": b"7"}, {"max_tokens": 7}),
        ({"max_completion_tokens": b"100000"}, {"max_completion_tokens": 64}),
        ({"max_tokens": b"1", "max_completion_tokens": b"100000"}, {"max_tokens": 1, "max_completion_tokens": 64}),
        ({"max_tokens": b"100000", "max_completion_tokens": b"null"}, {"max_tokens": 64}),
    ],
)
def test_every_output_cap_is_within_what_was_reserved(fields: dict[str, bytes], expected: dict[str, int]) -> None:
    """LM-01, LM-02."""
    body = rewritten({"model": b'"auto"'} | fields)
    assert {name: value for name, value in body.items() if name != "model"} == expected


@pytest.mark.parametrize("name", STRIPPED)
def test_members_that_steer_the_engine_past_the_gateway_are_dropped(name: str) -> None:
    assert name not in rewritten({"model": b'"auto"', name: b"1"})


@pytest.mark.parametrize("priority", [0, 10])
def test_the_priority_is_the_gateways(priority: int) -> None:
    assert rewritten({"priority": b"-99"}, priority=priority)["priority"] == priority


@pytest.mark.parametrize(
    ("given_options", "sent"),
    [
        (None, {"include_usage": True}),
        (b"null", {"include_usage": True}),
        (b"{}", {"include_usage": True}),
        # Alone it does nothing; beside the usage asked for here it would show on every chunk.
        (b'{"include_usage":false,"continuous_usage_stats":true}', {"include_usage": True}),
        (
            b'{"include_usage":true,"continuous_usage_stats":true}',
            {"include_usage": True, "continuous_usage_stats": True},
        ),
    ],
)
def test_a_streamed_call_always_asks_for_usage(given_options: bytes | None, sent: dict[str, bool]) -> None:
    fields = {"stream": b"true"} | ({} if given_options is None else {"stream_options": given_options})
    assert rewritten(fields, stream=True)["stream_options"] == sent


def test_a_plain_call_has_no_stream_options() -> None:
    assert "stream_options" not in rewritten({"stream_options": b"null"})


@pytest.mark.parametrize("model", ['quo"te', "Qwen/Qwen2.5-7B", "模型"])
def test_the_model_name_is_the_engines(model: str) -> None:
    assert json.loads(engine_body(a_call(), model, None))["model"] == model
