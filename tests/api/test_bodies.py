"""What may be in a body: refused before an engine hears of it, or passed on as it came."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fakes.client import CHAT, COMPLETIONS, chat, connected, exchange, post, request
from tests.fakes.gateway import Running, always, configured, posted, running, said
from tests.fakes.upstream import FakeUpstream

GOOD = b'"messages":[{"role":"user","content":"hi"}]'
TEXTS = {
    "nothing": b"",
    "a list": b"[]",
    "a text": b'"hi"',
    "a number": b"5",
    "null": b"null",
    "no model": b"{" + GOOD + b"}",
    "a model that is a number": b'{"model":5,' + GOOD + b"}",
    "an empty model": b'{"model":"",' + GOOD + b"}",
    "NaN": b'{"model":"small","temperature":NaN,' + GOOD + b"}",
    "Infinity": b'{"model":"small","temperature":-Infinity,' + GOOD + b"}",
    "too deep": b'{"model":"small","x":' + b"[" * 5_000 + b"]" * 5_000 + b"," + GOOD + b"}",
    "open brackets": b"[" * 5_000,
    "deep messages": b'{"model":"small","messages":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    "invalid UTF-8": b'{"model":"small","messages":[{"role":"user","content":"\xff\xfe"}]}',
    "invalid UTF-8 elsewhere": b'{"model":"small","user":"\xc3(",' + GOOD + b"}",
    "a BOM": b'\xef\xbb\xbf{"model":"small",' + GOOD + b"}",
    "half": b'{"model":"small",' + GOOD,
    "two documents": b'{"model":"small",' + GOOD + b"}{}",
    "single quotes": b"{'model':'small'}",
    "no messages": b'{"model":"small"}',
    "empty messages": b'{"model":"small","messages":[]}',
    "messages null": b'{"model":"small","messages":null}',
    "messages a text": b'{"model":"small","messages":"hi"}',
    "a message that is a text": b'{"model":"small","messages":["hi"]}',
    "a message without a role": b'{"model":"small","messages":[{"content":"hi"}]}',
    "content a number": b'{"model":"small","messages":[{"role":"user","content":7}]}',
    "a part that is a text": b'{"model":"small","messages":[{"role":"user","content":["hi"]}]}',
    "stream a text": b'{"model":"small","stream":"yes",' + GOOD + b"}",
    "max_tokens a text": b'{"model":"small","max_tokens":"5",' + GOOD + b"}",
    "max_tokens a bool": b'{"model":"small","max_tokens":true,' + GOOD + b"}",
    "max_tokens a fraction": b'{"model":"small","max_tokens":1.5,' + GOOD + b"}",
    "max_tokens negative": b'{"model":"small","max_tokens":-1,' + GOOD + b"}",
    "max_tokens huge": b'{"model":"small","max_tokens":1' + b"0" * 5000 + b"," + GOOD + b"}",
    "n zero": b'{"model":"small","n":0,' + GOOD + b"}",
    "stream_options without a stream": b'{"model":"small","stream_options":{"include_usage":true},' + GOOD + b"}",
    "stream_options a list": b'{"model":"small","stream":true,"stream_options":[],' + GOOD + b"}",
    "stream_options that nest": b'{"model":"small","stream":true,"stream_options":{"x":[[1]]},' + GOOD + b"}",
    "a part of a list type": b'{"model":"small","messages":[{"role":"user","content":[{"type":[1]}]}]}',
    "a part of an object type": b'{"model":"small","messages":[{"role":"user","content":[{"type":{}}]}]}',
    "tools a text": b'{"model":"small","tools":"all",' + GOOD + b"}",
}


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream(always(said())) as upstream:
        yield upstream


@pytest.fixture
async def gate(upstream: FakeUpstream) -> AsyncIterator[Running]:
    async with running(configured([upstream.port])) as gate:
        yield gate


async def test_malformed_bodies(gate: Running, upstream: FakeUpstream) -> None:
    loop = asyncio.get_running_loop()
    for name, text in TEXTS.items():
        began = loop.time()
        refused = await post(gate.api, text)
        assert refused.status == 400, (name, refused)
        assert refused.error["code"] == "malformed", name
        assert loop.time() - began < 0.5, name
    assert not posted(upstream)
    assert {record["status"] for record in await gate.logged(len(TEXTS))} == {400}


@pytest.mark.parametrize("depth", range(900, 1010, 5))
async def test_nesting_near_what_a_parser_can_take(gate: Running, depth: int) -> None:
    """One parser's limit is not another's: whatever the depth, it is an answer and never a fault of ours."""
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    for body in (
        b'{"model":"small","messages":[{"role":"user","content":"hi","x":' + deep + b"}]}",
        b'{"model":"small","messages":[{"role":"user","content":[' + deep + b"]}]}",
        b'{"model":"small","x":' + deep + b"," + GOOD + b"}",
    ):
        assert (await post(gate.api, body)).status in (200, 400)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, b'{"model":"small","prompt":[%s]}' % b",".join([b'"a"'] * 250_000)),
        (COMPLETIONS, b'{"model":"small","prompt":[%s]}' % b",".join([b"[1]"] * 250_000)),
        (COMPLETIONS, b'{"model":"small","prompt":[%s]}' % b",".join([b"1"] * 100_000)),
        (CHAT, b'{"model":"small","messages":[{"role":"user","content":[%s]}]}' % b",".join([b'{"a":1}'] * 125_000)),
        (CHAT, b'{"model":"small","messages":[%s]}' % b",".join([b'{"role":"user","content":""}'] * 35_000)),
        (CHAT, b'{"model":"small","messages":[{"role":"user","x":[%s]}]}' % b",".join([b"{}"] * 300_000)),
        (CHAT, b'{"model":"small",%s,%s}' % (GOOD, b",".join(b'"k%d":1' % each for each in range(100_000)))),
    ],
)
async def test_a_body_of_very_many_values_is_not_taken_apart(gate: Running, path: str, body: bytes) -> None:
    answer = await exchange(gate.api, request("POST", path, body, "key-acme"))
    assert (answer.status, answer.error["code"]) == (400, "prompt_too_long")
    assert "values" in answer.error["message"]


async def test_odd_but_good_bodies(gate: Running, upstream: FakeUpstream) -> None:
    contents: list[Any] = ["", None, [], [{"type": "text"}], [{"type": "input_audio", "input_audio": {}}]]
    bodies = [chat(content, model="auto") for content in contents]
    bodies += [chat(messages=[{"role": role, "content": "x"}]) for role in ("tool", "assistant", "developer")]
    bodies.append(chat(max_tokens=None, stream=None, n=None, stop=None, tools=None, stream_options=None))
    for body in bodies:
        assert (await post(gate.api, body)).status == 200, body
    assert len(posted(upstream)) == len(bodies)


async def test_of_a_key_given_twice_only_the_value_that_was_checked_is_sent(
    gate: Running, upstream: FakeUpstream
) -> None:
    text = b'{"max_tokens":99999,"max_tokens":7,"model":"large","model":"small",' + GOOD + b"}"
    assert (await post(gate.api, text)).status == 200
    sent = posted(upstream)[0]
    assert sent.json()["max_tokens"] == 7
    assert sent.body.count(b'"max_tokens"') == sent.body.count(b'"model"') == 1


async def test_everything_but_the_model_and_the_caps_arrives_unchanged(gate: Running, upstream: FakeUpstream) -> None:
    extra = {
        "chat_template_kwargs": {"enable_thinking": False},
        "guided_json": {"type": "object", "properties": {"a": {"type": "number", "minimum": 1e-7}}},
        "x_new_2027": [1, {"a": None}, 1.0, True, "é\u2028\u0085", 12345678901234567890],
        "temperature": 0.30000000000000004,
        "метка": "ключ",
        "messages": [
            {"role": "latest_reminder", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi", "x": None}], "name": "ann"},
        ],
        "max_tokens": 9,
    }
    text = json.dumps({"model": "auto", **extra}, ensure_ascii=False).encode()
    assert (await post(gate.api, text)).status == 200
    sent = posted(upstream)[0]
    assert sent.json() == {"model": "tiny-7b", **extra}
    assert json.dumps(extra["x_new_2027"], ensure_ascii=False).encode() in sent.body
    assert int(sent.headers["content-length"]) == len(sent.body)


async def test_members_that_steer_the_engine_are_not_the_callers_to_set(gate: Running, upstream: FakeUpstream) -> None:
    await post(gate.api, chat(priority=-100, kv_transfer_params={"do_remote_decode": True}, vllm_xargs={"a": 1}))
    assert set(posted(upstream)[0].json()) == {"model", "messages", "max_tokens"}


@pytest.mark.parametrize("where", ["content", "arguments", "user"])
async def test_a_lone_surrogate_passes_with_the_same_escape(gate: Running, upstream: FakeUpstream, where: str) -> None:
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "LONE"}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "LONE" if where == "content" else "hi"}]
    if where == "arguments":
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    body = chat(model="auto", messages=messages, user="LONE" if where == "user" else "u")
    text = json.dumps(body).replace("LONE", "cut \\ud83d here").encode()
    assert (await post(gate.api, text)).status == 200
    assert b'"cut \\ud83d here"' in posted(upstream)[0].body


async def test_a_chunked_body_with_extension_and_trailer(gate: Running, upstream: FakeUpstream) -> None:
    text = json.dumps(chat("in pieces")).encode()
    pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
    chunks = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: g\r\nauthorization: Bearer key-acme\r\n"
        "content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    answer = await exchange(gate.api, head.encode() + chunks + b"0\r\nx-trailer: secret\r\n\r\n")
    assert answer.status == 200
    sent = posted(upstream)[0]
    assert sent.json()["messages"] == chat("in pieces")["messages"]
    assert "transfer-encoding" not in sent.headers
    assert b"secret" not in sent.head
    assert int(sent.headers["content-length"]) == len(sent.body)


async def test_the_size_limit_holds_without_a_length_to_trust(upstream: FakeUpstream) -> None:
    async with running(configured([upstream.port], caps={"body": "64KiB"})) as gate, connected(gate.api) as client:
        client.send(
            f"POST {CHAT} HTTP/1.1\r\nhost: g\r\nauthorization: Bearer key-acme\r\n"
            "transfer-encoding: chunked\r\n\r\n".encode()
        )
        for _ in range(5):
            client.send(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
        refused = await client.response()
        assert (refused.status, refused.error["code"]) == (413, "body_too_large")
    assert not posted(upstream)


async def test_a_length_over_the_limit_is_refused_before_the_body_comes(gate: Running) -> None:
    refused = await exchange(gate.api, request("POST", CHAT, b"{", "key-acme", content_length="900000000"))
    assert (refused.status, refused.error["code"]) == (413, "body_too_large")


async def test_compressed_bodies_are_refused_all_alike(gate: Running, upstream: FakeUpstream) -> None:
    bomb = gzip.compress(b"0" * 10_000_000)
    for coding, body in (("gzip", gzip.compress(b"{}")), ("gzip", b"{}"), ("gzip", bomb), ("zstd", b"{}"), ("br", b"")):
        refused = await exchange(gate.api, request("POST", CHAT, body, "key-acme", content_encoding=coding))
        assert (refused.status, refused.error["code"]) == (415, "unsupported_media_type")
    assert (await post(gate.api, chat(), content_encoding="identity")).status == 200
    assert "content-encoding" not in posted(upstream)[0].headers


async def test_a_json_body_may_come_without_or_with_a_longer_content_type(gate: Running) -> None:
    for media in ("", "application/json; charset=utf-8", "application/vnd.x+json"):
        assert (await post(gate.api, chat(), content_type=media)).status == 200


async def test_completions_prompts(gate: Running, upstream: FakeUpstream) -> None:
    good: list[Any] = ["text", ["a", "b"], [1, 2, 3], [[1, 2], [3]]]
    for prompt in good:
        assert (await post(gate.api, {"model": "small", "prompt": prompt}, COMPLETIONS)).status == 200, prompt
    for prompt in ["", [], [""], [[]], 5, None, {}, [True]]:
        refused = await post(gate.api, {"model": "small", "prompt": prompt}, COMPLETIONS)
        assert (refused.status, refused.error["param"]) == (400, "prompt"), prompt
    assert [sent.json()["prompt"] for sent in posted(upstream)] == good
    assert {sent.target for sent in posted(upstream)} == {COMPLETIONS}
