"""Every request that a real vLLM was sent reaches an engine as it was written, but for what the gateway decides."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from json.decoder import JSONDecoder
from typing import Any

import pytest
import pytest_asyncio

from tests.fakes.client import Response, connected, eventually, get
from tests.fakes.gateway import LARGE, NOT_FOUND, SMALL, Running, configured, running, said
from tests.fakes.upstream import FakeUpstream, Peer, Received, chat_events, json_response, stream_response
from tests.wire.recordings import Recording, recordings

pytestmark = pytest.mark.asyncio(loop_scope="module")

WINDOW = 2048  # --max-model-len of the recorded servers
DEFAULT_MAX_TOKENS = 512
CAPS = ("max_tokens", "max_completion_tokens")
SET_BY_THE_GATEWAY = {"model", *CAPS, "stream_options"}
STRIPPED = {"priority", "kv_transfer_params", "ec_transfer_params", "vllm_xargs"}
MEMBER = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')

RECORDINGS = recordings()
del RECORDINGS["err_body_20MB_prompt"]  # its recording is cut short

NO_MODEL = "vLLM takes its only model; here a model decides who answers, and there are several"
# Requests that vLLM served and the gateway refuses.
REFUSED_HERE_ONLY = {
    "chat_model_omitted": ("malformed", NO_MODEL),
    "chat_model_null": ("malformed", NO_MODEL),
    "chat_model_empty": ("malformed", NO_MODEL),
    "err_max_tokens_numeric_string": ("malformed", 'vLLM reads "10" as 10; what is reserved must be a plain number'),
}
# Requests that vLLM refused and the gateway refuses itself.
REFUSED_BY_BOTH = {
    "err_bad_json": (400, "malformed"),
    "err_bad_utf8": (400, "malformed"),
    "err_comp_no_prompt": (400, "malformed"),
    "err_comp_prompt_empty": (400, "malformed"),
    "err_comp_prompt_empty_list": (400, "malformed"),
    "err_comp_prompt_null": (400, "malformed"),
    "err_comp_too_long": (400, "context_length_exceeded"),
    "err_empty_body": (400, "malformed"),
    "err_empty_messages": (400, "malformed"),
    "err_gzip_body": (415, "unsupported_media_type"),
    "err_json_array": (400, "malformed"),
    "err_json_nan": (400, "malformed"),
    "err_max_tokens_float": (400, "malformed"),
    "err_max_tokens_negative": (400, "malformed"),
    "err_max_tokens_string": (400, "malformed"),
    "err_max_tokens_zero": (400, "malformed"),
    "err_messages_string": (400, "malformed"),
    "err_missing_messages": (400, "malformed"),
    "err_n_huge": (400, "too_many_choices"),
    "err_n_zero": (400, "malformed"),
    "err_prompt_too_long": (400, "context_length_exceeded"),
    "err_prompt_too_long_no_max": (400, "context_length_exceeded"),
    "err_prompt_too_long_stream": (400, "context_length_exceeded"),
    "err_stream_options_without_stream": (400, "malformed"),
    "err_stream_string": (400, "malformed"),
    "err_unknown_model": (404, "unknown_model"),
    "err_unknown_model_stream": (404, "unknown_model"),
    "err_wrong_content_type": (415, "unsupported_media_type"),
}
# Requests that vLLM refused and that are mended on their way.
MENDED = {
    "chat_priority_string": "priority is taken out",
    "err_priority_huge": "priority is taken out",
    "err_no_content_type": "the gateway says that it sends JSON",
    "err_max_tokens_too_large": "lowered to the window",
    "err_max_tokens_too_large_stream": "lowered to the window",
    "err_comp_max_tokens_too_large": "lowered to the window",
}
LOWERED = {"err_max_tokens_just_over", *(name for name, how in MENDED.items() if how == "lowered to the window")}
# A lone surrogate is no text: members are read and written anew, so their white space may differ.
WRITTEN_ANEW = {"err_lone_surrogate"}

SENT_ON = sorted(RECORDINGS.keys() - REFUSED_HERE_ONLY.keys() - REFUSED_BY_BOTH.keys())


@dataclass
class Recorder:
    """A gateway in front of an engine that writes down what it is asked."""

    gate: Running
    heard: list[Received]

    async def send(self, recording: Recording) -> tuple[Response, list[Received]]:
        """The recorded bytes with a key of ours: (the answer, what the engine heard)."""
        before = len(self.heard)
        async with connected(self.gate.api) as client:
            client.send(with_key(recording.request))
            answer = await client.head()
            if "content-length" in answer.headers or "transfer-encoding" in answer.headers:
                await client.rest(answer)
            else:  # to HTTP/1.0
                assert answer.headers["connection"] == "close"
                answer.body = await client.reader.read()
        return answer, self.heard[before:]


def with_key(raw: bytes) -> bytes:
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not re.match(rb"(?i)(authorization|x-api-key):", line)]
    return b"\r\n".join([*lines, b"Authorization: Bearer key-acme", b"", body])


def members(text: str) -> dict[str, str]:
    """The members of a JSON object, each as it is written; the last of equal names."""
    found: dict[str, str] = {}
    at = text.index("{") + 1
    while name := MEMBER.match(text, at):
        at = JSONDecoder().raw_decode(text, name.end())[1]
        found[json.loads(name[1])] = text[name.end() : at]
    return found


def body_of(recording: Recording) -> str:
    """The JSON text of a request, without the framing of the one that was sent in chunks."""
    body = recording.request.partition(b"\r\n\r\n")[2].decode()
    return body.split("\r\n")[1] if "\r\n" in body else body


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def recorder() -> AsyncIterator[Recorder]:
    heard: list[Received] = []

    async def script(peer: Peer) -> None:
        while (received := await peer.request()) is not None:
            if received.method == "POST":
                heard.append(received)
                streamed = json.loads(received.body).get("stream")
                await peer.send(stream_response(chat_events("Hi", usage=(1, 1))) if streamed else said())
            else:
                models = json_response({"object": "list", "data": [{"id": "m", "max_model_len": WINDOW}]})
                await peer.send(models if received.target == "/v1/models" else NOT_FOUND)

    async with FakeUpstream(script) as upstream, running(configured([upstream.port], [upstream.port])) as gate:

        async def windows_known() -> bool:
            rows = (await get(gate.api, "/v1/models", key="key-acme")).json()["data"]
            return all(row.get("max_model_len") == WINDOW for row in rows if row["id"] != "auto")

        await eventually(windows_known)
        yield Recorder(gate, heard)


@pytest.mark.parametrize("name", SENT_ON)
async def test_a_request_arrives_as_it_was_written(recorder: Recorder, name: str) -> None:
    recording = RECORDINGS[name]
    answer, heard = await recorder.send(recording)
    assert (answer.status, len(heard)) == (200, 1)
    (received,) = heard
    assert (received.target, received.headers["content-type"]) == (recording.path, "application/json")
    assert not received.headers.keys() & {"authorization", "x-api-key", "x-priority"}
    asked, sent = members(body_of(recording)), members(received.body.decode())
    assert json.loads(sent["model"]) == json.loads(asked["model"]) in (SMALL, LARGE)
    kept = {member: text for member, text in asked.items() if member not in SET_BY_THE_GATEWAY | STRIPPED}
    arrived = {member: text for member, text in sent.items() if member not in SET_BY_THE_GATEWAY}
    if name in WRITTEN_ANEW:
        kept, arrived = parsed(kept), parsed(arrived)
    assert arrived == kept
    assert options(sent) == (wanted_options(asked) if asked.get("stream") == "true" else {})
    assert_caps(recording, asked, sent, answer)


def parsed(texts: dict[str, str]) -> dict[str, Any]:
    return {name: json.loads(text) for name, text in texts.items()}


def wanted_options(asked: dict[str, str]) -> dict[str, Any]:
    """Usage is always asked for; continuous usage, which does nothing alone, only goes with the caller's own asking."""
    own = options(asked)
    if not own.get("include_usage"):
        own.pop("continuous_usage_stats", None)
    return own | {"include_usage": True}


def options(texts: dict[str, str]) -> dict[str, Any]:
    """The `stream_options`; {} where there are none."""
    return json.loads(texts.get("stream_options", "null")) or {}


def assert_caps(recording: Recording, asked: dict[str, str], sent: dict[str, str], answer: Response) -> None:
    """Output caps as asked for or, where none was, the default; lowered only to what the window leaves."""
    given = {cap: int(asked[cap]) for cap in CAPS if asked.get(cap, "null") != "null"} or {CAPS[0]: DEFAULT_MAX_TOKENS}
    bounded = {cap: int(sent[cap]) for cap in CAPS if cap in sent}
    if recording.name not in LOWERED:
        assert bounded == given
        assert "x-tiergate-clamped" not in answer.headers
        return
    (lowered,) = bounded.values()
    assert answer.headers["x-tiergate-clamped"] == f"max_tokens={lowered}"
    prompt = recording.usage["prompt_tokens"] if recording.status == 200 and recording.usage else 1
    assert WINDOW - 100 < lowered <= WINDOW - prompt


@pytest.mark.parametrize("name", REFUSED_BY_BOTH)
async def test_what_an_engine_refuses_anyway_is_refused_at_the_door(recorder: Recorder, name: str) -> None:
    answer, heard = await recorder.send(RECORDINGS[name])
    assert (answer.status, answer.error["code"], heard) == (*REFUSED_BY_BOTH[name], [])


@pytest.mark.parametrize("name", REFUSED_HERE_ONLY)
async def test_what_an_engine_would_have_served_is_refused_for_a_reason(recorder: Recorder, name: str) -> None:
    answer, heard = await recorder.send(RECORDINGS[name])
    assert (answer.status, answer.error["code"], heard) == (400, REFUSED_HERE_ONLY[name][0], [])


async def test_the_lists_tell_every_difference() -> None:
    """A recording is in a list because it is refused by vLLM, or refused here: nothing else may be left out."""
    served = {name for name, each in RECORDINGS.items() if each.answer and each.status == 200}
    refused = {name for name, each in RECORDINGS.items() if each.answer and 400 <= each.status < 500}
    assert served >= REFUSED_HERE_ONLY.keys()
    assert refused >= REFUSED_BY_BOTH.keys() | MENDED.keys()
    assert len(served & {*SENT_ON}) > 90 and len(refused & {*SENT_ON}) > 20
