"""Every answer of a real vLLM reaches the client as it was, however the network cuts it up, and is accounted for."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import pytest_asyncio

from tests.fakes.client import CHAT, Response, connected, exchange, request
from tests.fakes.gateway import Running, configured, running, scripted
from tests.fakes.upstream import FakeUpstream, Peer, Received, until
from tests.wire.recordings import Recording, recordings, usage_only

pytestmark = pytest.mark.asyncio(loop_scope="module")

RECORDINGS = recordings()
SMALL_STREAM, SMALL_BODY = 2700, 360  # bytes of the largest answers that are also sent one by one

# Answers that the gateway puts into its own words: (status, code).
REPLACED = {
    # 401: the engine did not accept the gateway's key, which is nothing the caller can mend.
    "auth_basic": (502, "upstream_error"),
    "auth_missing": (502, "upstream_error"),
    "auth_wrong": (502, "upstream_error"),
    "auth_x_api_key_only": (502, "upstream_error"),
    # 500: what died in there is for the operator.
    "kill_enginecore_sigkill_nonstream": (502, "upstream_error"),
    "kill_worker_sigkill_nonstream": (502, "upstream_error"),
    # 503: the engine's own limit is a full pool.
    "queue_full_503_nonstream": (503, "past_knee"),
    "queue_full_503_stream": (503, "past_knee"),
    "queue_full_completions_list": (503, "past_knee"),
    "queue_tokens_full_503_nonstream": (503, "past_knee"),
    # 200, but the first event is an error.
    "kill_enginecore_sigkill_queued1": (502, "upstream_error"),
    "kill_worker_sigkill_fill7": (502, "upstream_error"),
    "queue_full_inband_503_in_200_stream": (503, "past_knee"),
    # Closed before any of the answer, or after its head.
    "kill_api_sigkill_nonstream": (502, "upstream_error"),
    "kill_api_sigkill_queued1": (502, "upstream_error"),
}
# 500 "cannot schedule new futures after shutdown": the endpoint is left alone from then on.
DRAINING = ("drain_new_request_500", "drain_new_request_stream", "drain_v1_completions")
# The engine went silent with the connection open, before it said anything or in the middle of a stream.
NEVER_BEGAN = (
    "kill_api_sigterm_default_fill7",
    "kill_api_sigterm_default_nonstream",
    "kill_api_sigterm_drain1_nonstream",
    "kill_api_sigterm_drain1_queued1",
)
# Streams that broke off, and what the gateway says of it.
BROKE_OFF = {
    "kill_api_sigkill_fill7": "upstream_error",
    "kill_api_sigkill_stream": "upstream_error",
    "kill_api_sigterm_default_stream": "upstream_timeout",
    "kill_api_sigterm_drain1_stream": "upstream_timeout",
}
# Streams in whose middle the engine itself reported its death: once begun they pass as they are.
FAILED_INSIDE = ("kill_enginecore_sigkill_stream", "kill_worker_sigkill_stream")
CLOSED = {name for name in RECORDINGS if name.startswith("kill_api_sigkill")}
SILENT = {*NEVER_BEGAN, *(name for name, code in BROKE_OFF.items() if code == "upstream_timeout")}

PASSED = sorted(RECORDINGS.keys() - REPLACED.keys() - BROKE_OFF.keys() - {*DRAINING, *NEVER_BEGAN, *FAILED_INSIDE})
STREAMS = [name for name in PASSED if RECORDINGS[name].headers["content-type"].startswith("text/event-stream")]
# What another engine may do better at; the rest would fail there too, or the gateway cannot know.
ELSEWHERE = (
    *DRAINING,
    "kill_api_sigkill_nonstream",
    "kill_api_sigkill_queued1",
    "kill_enginecore_sigkill_nonstream",
    "kill_enginecore_sigkill_queued1",
    "queue_full_503_stream",
    "queue_full_completions_list",
    "queue_full_inband_503_in_200_stream",
)


@dataclass
class Replay:
    """A gateway in front of an engine that gives the answers of the recordings, as the id of a call orders it."""

    gate: Running

    async def get(self, recording: Recording, way: str, **options: Any) -> tuple[Response, dict[str, Any]]:
        """Answer and log record of a harmless call that gets this recording, sent in this way."""
        call_id = f"{recording.name}.{way}"
        raw = request("POST", recording.path, harmless(recording, **options), "key-acme", x_request_id=call_id)
        answer = await exchange(self.gate.api, raw)
        assert answer.headers["x-request-id"] == call_id
        return answer, await self.record(call_id)

    async def record(self, call_id: str) -> dict[str, Any]:
        """What the log says of this call."""
        mark = json.dumps(call_id)
        await until(lambda: mark in self.gate.text.getvalue())
        line = next(line for line in self.gate.text.getvalue().splitlines() if mark in line)
        record: dict[str, Any] = json.loads(line)
        assert (record["event"], record["id"]) == ("call", call_id)
        return record

    async def ways(self, recording: Recording, case: str = "", **options: Any) -> list[tuple[Response, dict[str, Any]]]:
        """The same recording in one piece, cut at random, and byte by byte if it is small: all at once."""
        limit = SMALL_STREAM if recording.asked.get("stream") is True else SMALL_BODY
        small = len(recording.answer) <= limit or recording.name in ("chat_basic", "comp_basic")
        ways = ["whole", "cut", "bytewise"] if small else ["whole", "cut"]
        return await asyncio.gather(*(self.get(recording, f"{case}{way}", **options) for way in ways))


def harmless(recording: Recording, model: str = "small", usage: bool = True) -> bytes:
    """The body of a call that the gateway does not mind, streamed if the recorded one was."""
    body: dict[str, Any] = {"model": model, "max_tokens": 64}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if recording.path == CHAT else {"prompt": "Hi"}
    if recording.asked.get("stream") is True:
        body |= {"stream": True, "stream_options": {"include_usage": usage}}
    return json.dumps(body).encode()


async def play(peer: Peer, received: Received) -> None:
    """Send what the id of the call asks for, and end the connection as the recorded one was ended."""
    name, way = received.headers["x-request-id"].split(".")
    raw = RECORDINGS[name].answer
    if way.endswith("bytewise"):
        await peer.send_bytewise(raw)
    else:
        dice = Random(name)
        cuts = sorted(dice.sample(range(len(raw)), min(len(raw), dice.randint(10, 60)))) if way.endswith("cut") else []
        for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
            await peer.send(raw[begin:end])
            await asyncio.sleep(0)
    if name in SILENT:
        await peer.client_left()
    elif name in CLOSED:
        peer.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replay() -> AsyncIterator[Replay]:
    """Two pools on one engine that is never ejected; "large" has little patience with it."""
    hasty = {"timeouts": {"first_token": "300ms", "gap": "300ms"}, "slo": {"inter_token": "1ms"}}
    async with FakeUpstream(scripted(play)) as upstream:
        config = configured([upstream.port], [upstream.port], pools={"large": hasty}, health={"eject_after": 1000})
        async with running(config) as gate:
            yield Replay(gate)


def assert_counted(recording: Recording, record: dict[str, Any]) -> None:
    """The log has the usage that the engine told, or says that it had to estimate."""
    usage = recording.usage
    if usage is None:
        assert record["usage_estimated"]
        return
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    counts = (record["prompt_tokens"], record["completion_tokens"], record["cached_tokens"])
    assert (*counts, record["usage_estimated"]) == (usage["prompt_tokens"], usage["completion_tokens"], cached, False)


def told(record: dict[str, Any]) -> tuple[int, str, str]:
    return record["status"], record["outcome"], record["reason"]


# -- as it was ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PASSED)
async def test_an_answer_passes_byte_for_byte(replay: Replay, name: str) -> None:
    recording = RECORDINGS[name]
    for answer, record in await replay.ways(recording):
        assert (answer.status, answer.body) == (recording.status, recording.body)
        for header in ("content-type", "endpoint-load-metrics"):
            assert answer.headers.get(header) == recording.headers.get(header)
        if recording.status >= 400:
            assert told(record) == (recording.status, "refused", "engine_refused")
            assert "prompt_tokens" not in record
            continue
        assert told(record) == (200, "ok", "")
        assert_counted(recording, record)


@pytest.mark.parametrize("name", STREAMS)
async def test_usage_that_was_not_asked_for_is_hidden_and_still_counted(replay: Replay, name: str) -> None:
    recording = RECORDINGS[name]
    shown = b"".join(block for block in recording.blocks if not usage_only(block))
    for answer, record in await replay.ways(recording, "hidden-", usage=False):
        assert (answer.status, answer.body) == (200, shown)
        assert_counted(recording, record)


async def test_the_recordings_hold_what_these_tests_are_about() -> None:
    kinds = Counter(RECORDINGS[name].status for name in PASSED)
    assert kinds[200] > 90 and kinds[400] > 45 and kinds[404] == 2, kinds
    extra = [name for name in STREAMS if any(map(usage_only, RECORDINGS[name].blocks))]
    assert len(STREAMS) > 20 and len(extra) >= 4, extra
    assert any(b": keep-alive" in RECORDINGS[name].body for name in STREAMS)
    assert sum(RECORDINGS[name].headers.get("endpoint-load-metrics") is not None for name in PASSED) >= 3


# -- as it should have been ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REPLACED)
async def test_what_is_no_answer_is_said_in_the_gateways_words(replay: Replay, name: str) -> None:
    recording = RECORDINGS[name]
    status, code = REPLACED[name]
    for answer, record in await replay.ways(recording):
        assert (answer.status, answer.error["code"]) == (status, code)
        assert told(record) == (status, "shed" if status == 503 else "failed", code)
        assert int(answer.headers["retry-after"]) >= 1
        assert b"EngineCore" not in answer.body and b"Unauthorized" not in answer.body


@pytest.mark.parametrize("name", NEVER_BEGAN)
async def test_silence_is_ended(replay: Replay, name: str) -> None:
    answer, record = await replay.get(RECORDINGS[name], "whole", model="large")
    assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")
    assert told(record) == (504, "failed", "upstream_timeout")


@pytest.mark.parametrize("name", BROKE_OFF)
async def test_a_stream_that_breaks_off_is_whole_as_far_as_it_came(replay: Replay, name: str) -> None:
    recording, code = RECORDINGS[name], BROKE_OFF[name]
    for way in ("whole", "cut"):
        answer, record = await replay.get(recording, way, model="large" if name in SILENT else "small")
        assert answer.status == 200
        assert answer.body.startswith(recording.body)
        last = answer.body.removeprefix(recording.body)
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == code
        assert last.count(b"\n\n") == 1 and last.endswith(b"\n\n")
        assert told(record) == (200, "failed", code)
        assert record["usage_estimated"] == (recording.usage is None)


@pytest.mark.parametrize("name", FAILED_INSIDE)
async def test_an_engines_own_error_in_the_middle_passes_as_it_is(name: str) -> None:
    recording = RECORDINGS[name]
    first = recording.answer.index(b"\n\n\r\n") + 4
    begun = asyncio.Event()

    async def in_two(peer: Peer, received: Received) -> None:
        await peer.send(recording.answer[:first])
        await begun.wait()  # an error that is there before the client has anything becomes a status instead
        await peer.send(recording.answer[first:])

    async with FakeUpstream(scripted(in_two)) as upstream, running(configured([upstream.port])) as gate:
        async with connected(gate.api) as client:
            client.send(request("POST", recording.path, harmless(recording), "key-acme"))
            head = await client.head()
            began = await client.piece()
            begun.set()
            assert (head.status, began + await client.pieces()) == (200, recording.body)
        assert told(await gate.record(head.headers["x-request-id"])) == (200, "failed", "upstream_error")


@pytest.mark.parametrize("name", ELSEWHERE)
async def test_another_engine_gives_the_answer(name: str) -> None:
    failed = RECORDINGS[name]
    streamed = failed.asked.get("stream") is True
    good = RECORDINGS[("chat" if failed.path == CHAT else "comp") + ("_stream" if streamed else "_basic")]
    left = [good.answer, failed.answer]

    async def once(peer: Peer, received: Received) -> None:
        raw = left.pop()
        await peer.send(raw)
        if raw is failed.answer and name in CLOSED:
            peer.close()

    async with (
        FakeUpstream(scripted(once)) as one,
        FakeUpstream(scripted(once)) as two,
        running(configured([one.port, two.port], retry={"budget": 1.0})) as gate,
    ):
        answer = await exchange(gate.api, request("POST", failed.path, harmless(failed), "key-acme"))
        assert (answer.status, answer.body) == (good.status, good.body)
        record = await gate.record(answer.headers["x-request-id"])
        assert (*told(record), record["attempts"]) == (200, "ok", "", 2)


@pytest.mark.parametrize("name", DRAINING)
async def test_an_engine_that_drains_and_has_no_neighbour(name: str) -> None:
    failed = RECORDINGS[name]

    async def always(peer: Peer, received: Received) -> None:
        await peer.send(failed.answer)

    async with FakeUpstream(scripted(always)) as upstream, running(configured([upstream.port])) as gate:
        raw = request("POST", failed.path, harmless(failed), "key-acme")
        answer = await exchange(gate.api, raw)
        assert (answer.status, answer.error["code"]) == (502, "upstream_error")
        answer = await exchange(gate.api, raw)
        assert (answer.status, answer.error["code"]) == (503, "no_endpoint")
