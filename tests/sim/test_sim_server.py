"""The simulated engine over real sockets: streams, disconnects, keep-alive, priority, faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest

from gateway.sim.faults import FaultError
from tests.sim.client import Client, Connect, Start, chat, get, post, until

CHAT = "/v1/chat/completions"
ENDLESS = {"max_tokens": 2000, "ignore_eos": True}


async def streaming(connect: Connect, port: int, **fields: object) -> Client:
    """A client whose stream has begun."""
    client = await connect(port)
    client.post(CHAT, chat(stream=True, **{**ENDLESS, **fields}))
    assert (await client.head()).status == 200
    await client.reader.readuntil(b"\n\n")
    return client


async def test_headers_leave_before_the_first_token(start: Start, connect: Connect) -> None:
    sim, port = await start()
    sim.inject({"freeze": True})
    client = await connect(port)
    client.post(CHAT, chat(stream=True, max_tokens=2, ignore_eos=True))
    assert (await client.head()).status == 200
    assert sim.state().waiting == 1
    sim.inject({"freeze": False})
    pieces = [piece async for piece in client.pieces()]
    assert b'"role":"assistant"' in pieces[0]
    assert len(pieces) == 4


async def leave(client: Client) -> None:
    await client.close()


async def half_close(client: Client) -> None:
    client.writer.write_eof()
    # Everything sent so far may still be read; then comes the end, without the stream's own.
    assert b"[DONE]" not in await client.reader.read()


@pytest.mark.parametrize("go", [leave, half_close])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_aborted(
    start: Start, connect: Connect, stream: bool, go: Callable[[Client], Any]
) -> None:
    sim, port = await start(t0=0.005)
    client = await connect(port)
    client.post(CHAT, chat(stream=stream, n=2, **ENDLESS))
    await until(lambda: sim.state().running == 2)
    with contextlib.suppress(ConnectionResetError):
        await go(client)
    await until(lambda: sim.state().aborted == 2)
    state = sim.state()
    assert (state.running, state.waiting, state.used_blocks, state.in_flight) == (0, 0, 0, 0)
    assert 'finished_reason="abort",model_name="tiny-7b"} 0.0' in (await get(port, "/metrics")).body.decode()


async def test_an_abort_in_the_middle_of_a_step_leaves_the_others_alone(start: Start, connect: Connect) -> None:
    sim, port = await start(t0=0.005)
    going = await streaming(connect, port)
    staying = await connect(port)
    staying.post(CHAT, chat(max_tokens=10, ignore_eos=True))
    await until(lambda: sim.state().running == 2)
    await going.close()
    answer = await asyncio.wait_for(staying.response(), 5)
    assert answer.json()["usage"]["completion_tokens"] == 10
    assert sim.state().aborted == 1


async def test_a_client_that_leaves_the_queue_is_aborted(start: Start, connect: Connect) -> None:
    sim, port = await start(max_num_seqs=1, t0=0.005)
    await streaming(connect, port)
    waiting = await connect(port)
    waiting.post(CHAT, chat(stream=True, **ENDLESS))
    await waiting.head()
    assert (sim.state().running, sim.state().waiting) == (1, 1)
    assert (await get(port, "/load")).json() == {"server_load": 2}
    await waiting.close()
    await until(lambda: sim.state().aborted == 1)
    assert (sim.state().running, sim.state().waiting) == (1, 0)


async def test_lower_priority_values_overtake_in_the_queue(start: Start) -> None:
    sim, port = await start(max_num_seqs=1)
    sim.inject({"freeze": True})
    order: list[str] = []

    async def ask(name: str, priority: int, **headers: str) -> None:
        body = chat(max_tokens=3, ignore_eos=True, priority=priority)
        await post(port, CHAT, body, **headers)
        order.append(name)

    calls = []
    asked: list[tuple[str, int, dict[str, str]]] = [
        ("batch", 10, {}),
        ("online", 0, {}),
        ("header", 10, {"x_vllm_priority": "-1"}),
        ("nonsense", 5, {"x_vllm_priority": "high"}),
    ]
    for count, (name, priority, headers) in enumerate(asked, 1):
        calls.append(asyncio.create_task(ask(name, priority, **headers)))
        await until(lambda count=count: sim.state().in_flight == count)  # type: ignore[misc]
    sim.inject({"reset": True})
    await asyncio.gather(*calls)
    assert order == ["header", "online", "nonsense", "batch"]


async def test_idle_connections_are_closed_but_not_those_at_work(start: Start, connect: Connect) -> None:
    sim, port = await start(keepalive=0.2, t0=0.06)
    client = await connect(port)
    for _ in range(2):  # the answer takes longer than the idle time
        client.post(CHAT, chat(max_tokens=5, ignore_eos=True))
        assert (await client.response()).status == 200
    assert await asyncio.wait_for(client.reader.read(), 5) == b""
    await until(lambda: sim.state().connections == 0)


async def test_answers_come_in_order_on_one_connection(start: Start, connect: Connect) -> None:
    _, port = await start()
    client = await connect(port)
    client.post(CHAT, chat(max_tokens=30, ignore_eos=True))
    client.post("/tokenize", {"prompt": "x"})
    client.post(CHAT, chat(stream=True, max_tokens=1, ignore_eos=True))
    client.writer.write(b"GET /health HTTP/1.1\r\nhost: sim\r\n\r\n")
    answers = [await client.response() for _ in range(4)]
    assert answers[0].json()["usage"]["completion_tokens"] == 30
    assert answers[1].json()["count"] == 1
    assert answers[2].events()[-1] == "[DONE]"
    assert (answers[3].status, answers[3].body) == (200, b"")


async def test_connection_close_and_chunked_bodies_are_honoured(start: Start, connect: Connect) -> None:
    _, port = await start()
    client = await connect(port)
    body = json.dumps(chat(max_tokens=1)).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: s\r\ncontent-type: application/json\r\nconnection: close\r\n"
    client.writer.write(head + b"transfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n")
    assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    answer = await client.response()
    assert answer.status == 200 and answer.headers["connection"] == "close"
    assert await asyncio.wait_for(client.reader.read(), 2) == b""  # long before the idle time is over


async def test_a_slow_reader_does_not_slow_the_engine(start: Start, connect: Connect) -> None:
    sim, port = await start()
    client = await connect(port)
    client.post(CHAT, chat(stream=True, max_tokens=1500, ignore_eos=True, n=2))
    await client.head()
    await until(lambda: sim.state().finished == 2)
    assert len([piece async for piece in client.pieces()]) == 2 + 3000 + 1
    assert sim.state().step < 1600


async def test_a_freeze_stops_tokens_while_operations_answer(start: Start, connect: Connect) -> None:
    sim, port = await start()
    await streaming(connect, port)
    assert (await post(port, "/sim/faults", {"freeze": True})).json()["freeze"] is True
    step = sim.state().step
    for path in ("/health", "/metrics", "/v1/models"):
        assert (await get(port, path)).status == 200
    frozen = sim.state()
    assert (frozen.step, frozen.running) == (step, 1)
    await post(port, "/sim/faults", {"freeze": 0.05})
    await until(lambda: sim.state().step > step + 2)


async def test_slow_stretches_every_step(start: Start) -> None:
    sim, port = await start(t0=0.002)
    loop = asyncio.get_running_loop()

    sim.inject({"slow": 10})
    begun = loop.time()
    await post(port, CHAT, chat(max_tokens=20, ignore_eos=True))
    assert loop.time() - begun >= 0.35


async def test_a_stream_is_cut_after_so_many_tokens_for_so_many_streams(start: Start, connect: Connect) -> None:
    sim, port = await start()
    sim.inject({"cut_after": 3, "count": 1})
    client = await connect(port)
    client.post(CHAT, chat(stream=True, max_tokens=9, ignore_eos=True))
    await client.head()
    got = await client.reader.read()
    assert got.count(b"data: ") == 4 and not got.endswith(b"0\r\n\r\n")  # the role and three tokens
    assert sim.state().aborted == 1 and sim.state().running == 0
    whole = await post(port, CHAT, chat(stream=True, max_tokens=9, ignore_eos=True))
    assert whole.events()[-1] == "[DONE]"


async def test_a_cut_may_be_a_reset(start: Start, connect: Connect) -> None:
    sim, port = await start()
    sim.inject({"cut_after": 0, "rst": True})
    client = await connect(port)
    client.post(CHAT, chat(stream=True))
    with pytest.raises(ConnectionResetError):
        await client.reader.read()
    await until(lambda: sim.state().aborted == 1)


@pytest.mark.parametrize(
    ("order", "tokens", "text"),
    [
        ({"error_event_after": 0}, 0, "EngineCore encountered an issue"),
        ({"error_event_after": 2}, 2, "EngineCore encountered an issue"),
        ({"error_event_after": 0, "code": 503}, 0, "The engine is currently busy"),
    ],
)
async def test_an_error_event_ends_a_stream_that_began_with_200(
    start: Start, order: dict[str, object], tokens: int, text: str
) -> None:
    sim, port = await start()
    sim.inject({**order, "count": 1})
    answer = await post(port, CHAT, chat(stream=True, **ENDLESS))
    assert answer.status == 200
    *events, error = answer.chunks()
    assert len(events) == (tokens + 1 if tokens else 0)
    assert error["error"]["code"] == order.get("code", 500)
    assert error["error"]["message"].startswith(text)
    assert sim.state().running == 0


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (503, "Service Unavailable", "The engine is currently busy"),
        (500, "InternalServerError", "cannot schedule new futures after shutdown"),
    ],
)
async def test_a_status_is_answered_so_many_times(start: Start, status: int, kind: str, text: str) -> None:
    sim, port = await start()
    sim.inject({"status": status, "count": 2})
    for _ in range(2):
        answer = await post(port, CHAT, chat(stream=True))
        error = answer.json()["error"]
        assert (answer.status, error["type"], error["code"]) == (status, kind, status)
        assert error["message"].startswith(text)
    assert (await post(port, CHAT, chat(max_tokens=1))).status == 200


async def test_refusing_connections_ends_by_itself_on_the_same_port(start: Start, connect: Connect) -> None:
    sim, port = await start()
    kept = await streaming(connect, port)
    sim.inject({"refuse": 0.5})
    with pytest.raises(ConnectionRefusedError):
        await connect(port)
    assert await kept.reader.readuntil(b"\n\n")  # what is open stays open

    async with asyncio.timeout(5):
        while True:
            try:
                answer = await get(port, "/health")
                break
            except ConnectionRefusedError:
                await asyncio.sleep(0.01)
    assert answer.status == 200


async def test_refusing_connections_for_good_ends_by_reset(start: Start, connect: Connect) -> None:
    sim, port = await start()
    sim.inject({"refuse": True})
    with pytest.raises(ConnectionRefusedError):
        await connect(port)
    sim.inject({"reset": True})
    await asyncio.sleep(0)
    assert (await get(port, "/health")).status == 200


async def test_metrics_go_bad_on_demand(start: Start) -> None:
    sim, port = await start()

    async def metrics(**order: object) -> tuple[int, str]:
        sim.inject({"reset": True, **order})
        answer = await get(port, "/metrics")
        return answer.status, answer.body.decode()

    status, old = await metrics(metrics="old_names")
    assert status == 200 and "vllm:gpu_cache_usage_perc" in old and "vllm:time_per_output_token_seconds" in old
    assert "vllm:kv_cache_usage_perc" not in old and "waiting_by_reason" not in old
    assert await metrics(metrics="500") == (500, "Internal Server Error")
    assert "NaNopq" in (await metrics(metrics="broken"))[1]
    sim.inject({"reset": True, "metrics": "frozen"})
    await post(port, CHAT, chat(max_tokens=3, ignore_eos=True))
    assert 'generation_tokens_total{engine="0",model_name="tiny-7b"} 0.0' in (await get(port, "/metrics")).body.decode()
    assert 'generation_tokens_total{engine="0",model_name="tiny-7b"} 3.0' in (await metrics())[1]
    begun = asyncio.get_running_loop().time()
    assert (await metrics(metrics="slow", delay=0.1))[0] == 200
    assert asyncio.get_running_loop().time() - begun >= 0.09


@pytest.mark.parametrize(
    "order",
    [
        {"frieze": True},
        {"slow": "very"},
        {"slow": True},
        {"count": 1, "cut_after": -1},
        {"cut_after": 1, "error_event_after": 1},
        {"status": 200},
        {"status": 503, "message": 5},
        {"error_event_after": 1, "code": 1},
        {"metrics": "odd"},
        {"freeze": "long"},
        {"cut_after": 1, "rst": 1},
        [],
    ],
)
async def test_a_senseless_order_changes_nothing(start: Start, order: Any) -> None:
    sim, port = await start()
    before = (await get(port, "/sim/faults")).json()
    answer = await post(port, "/sim/faults", order)
    assert answer.status == 400 and answer.json()["error"]["type"] == "BadRequestError"
    with pytest.raises(FaultError):
        sim.inject(order)
    assert (await get(port, "/sim/faults")).json() == before


async def test_the_state_shows_what_arrived(start: Start) -> None:
    _, port = await start()
    await post(port, CHAT, chat(max_tokens=1, mark="here"), x_tenant="acme")
    state = (await get(port, "/sim/state")).json()
    (last,) = state["requests"]
    assert (last["method"], last["path"], last["headers"]["x-tenant"]) == ("POST", CHAT, "acme")
    assert json.loads(last["body"])["mark"] == "here"
    assert state["finished"] == 1 and state["connections"] >= 1


async def test_stop_closes_everything_at_once(start: Start, connect: Connect) -> None:
    sim, port = await start()
    client = await streaming(connect, port)
    await sim.stop()
    with contextlib.suppress(ConnectionResetError):
        assert b"[DONE]" not in await client.reader.read()
    with pytest.raises(ConnectionRefusedError):
        await connect(port)
    assert sim.state().connections == 0


async def test_serve_runs_until_it_is_told_to_stop(connect: Connect) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = (
        "import asyncio; from gateway.sim.profile import load_profile; from gateway.sim.server import serve;"
        f"asyncio.run(serve(load_profile('fast'), 'tiny-7b', '127.0.0.1', {port}))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-W", "error", "-c", program)
    async with asyncio.timeout(15):
        while True:
            try:
                assert (await get(port, "/health")).status == 200
                break
            except ConnectionRefusedError:
                assert process.returncode is None
                await asyncio.sleep(0.02)
        await streaming(connect, port)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
