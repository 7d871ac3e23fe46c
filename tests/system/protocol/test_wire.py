"""What clients do to the wire itself: requests sent ahead, endless heads, silence, upgrades, HTTP/1.0, no HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import product
from typing import Any

import pytest

from gateway.runtime.servers import EmbeddedServer, listener
from tests.fakes.client import CHAT, DEADLINE, Client, Response, chat, connected, eventually, exchange, get, request
from tests.fakes.gateway import Engine, Running, configured, engine, running
from tests.fakes.upstream import until

SOON = 0.5
SLOW = 1.0  # s that a client may take for its request
LIVEZ = request("GET", "/livez")
HEAD = b"GET /livez HTTP/1.1\r\nhost: gateway\r\n"
MORE = 256 * 1024  # well above what a head may have


@pytest.fixture
async def small() -> AsyncIterator[Engine]:
    async with engine(t0=0.01) as small:
        yield small


@pytest.fixture
async def gate(small: Engine, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Running]:
    """A gateway that must not say a word on stderr, whatever a client does."""
    async with running(configured([small.port], timeouts={"body": f"{SLOW}s"})) as gate:
        yield gate
        await gate.idle()
    assert [each.getMessage() for each in caplog.get_records("call") if each.levelno >= logging.WARNING] == []


def call(stream: bool = True, tokens: int = 3000, **headers: Any) -> bytes:
    body = chat(stream=stream, max_tokens=tokens, ignore_eos=True)
    return request("POST", CHAT, json.dumps(body).encode(), "key-acme", **headers)


def fin(client: Client) -> None:
    client.writer.close()


def rst(client: Client) -> None:
    client.reset()


BEHIND = {
    "a stream": call(),
    "a plain call": call(stream=False),
    "a GET": LIVEZ,
    "half a head": HEAD[:-5],
    "a body that does not fit": request("POST", CHAT, b"x" * 200_000, "key-acme", content_length="500000"),
    "too many": LIVEZ * 50,
    "too much": request("POST", CHAT, b"x" * 3_000_000, "key-acme"),
    "no HTTP": b"\x00\r\n\r\n",
}


async def test_a_client_that_leaves_is_noticed_whatever_it_sent_ahead(
    small: Engine, gate: Running, subtests: pytest.Subtests
) -> None:
    for count, (stream, leave, name) in enumerate(product((True, False), (fin, rst), BEHIND), 1):
        with subtests.test(name, stream=stream, leave=leave.__name__):
            async with connected(gate.api) as client:
                client.send(call(stream) + BEHIND[name])
                await until(lambda: small.load == (1, 0))
                if stream:
                    await client.head()
                await drained(client)
                leave(client)
                await until(lambda: small.load == (0, 0), SOON)
                await gate.idle(SOON)
            record = (await gate.logged(count))[-1]
            assert (record["outcome"], record["reason"]) == ("gone", "client_gone")
            assert len(gate.calls()) == len(small.bodies()) == count


async def test_requests_sent_ahead_are_answered_in_order(gate: Running) -> None:
    async with connected(gate.api) as client:
        client.send(call(tokens=5) + LIVEZ + call(stream=False, tokens=2) + LIVEZ)
        assert (await client.response()).done
        kinds = [(await client.response()).headers["content-type"] for _ in range(3)]
        assert kinds == ["application/json"] * 3
        client.send(LIVEZ)
        assert (await client.response()).status == 200


async def test_too_many_requests_sent_ahead_end_the_connection_after_those_in_line(gate: Running) -> None:
    async with connected(gate.api) as client:
        client.send(call(tokens=50) + LIVEZ * 20)
        assert (await client.response()).done
        answers = [await client.response() for _ in range(8)]
        assert [each.headers.get("connection") for each in answers] == [None] * 7 + ["close"]
        await closed(client)


@pytest.mark.parametrize("name", ["too much", "no HTTP"])
async def test_a_fault_behind_a_call_does_not_harm_its_answer(gate: Running, name: str) -> None:
    async with connected(gate.api) as client:
        client.send(call(tokens=100) + BEHIND[name])
        answer = await client.response()
        assert (answer.status, answer.done) == (200, True)
        await closed(client)


LONG = {
    "one header": HEAD + b"x-long: " + b"a" * MORE,
    "many headers": HEAD + b"x: y\r\n" * (MORE // 6),
    "a path": b"GET /" + b"a" * MORE,
    "a header's name": HEAD + b"a" * MORE,
    "empty lines": b"\r\n" * (MORE // 2),
    "trailers": request("POST", CHAT, b"", "key-acme", content_length="", transfer_encoding="chunked")
    + b"2\r\n{}\r\n0\r\nx-long: "
    + b"a" * MORE,
    "a chunk's extension": request("POST", CHAT, b"", "key-acme", content_length="", transfer_encoding="chunked")
    + b"2;"
    + b"a" * MORE,
}


async def test_an_endless_head_is_refused_before_it_ends(gate: Running, subtests: pytest.Subtests) -> None:
    for name, raw in LONG.items():
        with subtests.test(name):
            async with connected(gate.api) as client:
                for at in range(0, len(raw), 8192):
                    client.send(raw[at : at + 8192])
                    await drained(client)
                await malformed(client, "65,536 bytes")


async def test_a_head_too_large_is_refused_even_if_it_comes_at_once(gate: Running) -> None:
    async with connected(gate.api) as client:
        client.send(HEAD + b"x-long: " + b"a" * 66_000 + b"\r\n\r\n")
        await malformed(client, "65,536 bytes")


async def test_a_large_head_is_served_and_so_is_a_large_body_with_it(gate: Running) -> None:
    async with connected(gate.api) as client:
        for _ in range(2):
            client.send(HEAD + b"x-long: " + b"a" * 60_000 + b"\r\n\r\n")
            assert (await client.response()).status == 200
        body = json.dumps(chat("word " * 3_000, max_tokens=1, metadata={"x": "y" * 300_000})).encode()
        raw = request("POST", CHAT, body, "key-acme", x_long="a" * 30_000)
        for at in range(0, len(raw), 8192):
            client.send(raw[at : at + 8192])
            await asyncio.sleep(0)
        assert (await client.response()).status == 200


@pytest.mark.parametrize("path", ["api", "ops"])
async def test_silence_and_half_a_request_are_not_waited_for(gate: Running, path: str) -> None:
    """A connection between two requests, though, may rest; it did so from before the others came."""
    port: int = getattr(gate, path)
    async with connected(port) as resting, connected(port) as silent, connected(port) as half, connected(port) as used:
        for client in (resting, used):
            client.send(LIVEZ)
            assert (await client.response()).status == 200
        half.send(HEAD)
        used.send(HEAD)
        dripping = asyncio.create_task(drip(half))
        for client in (half, used):
            answer = await client.response()
            assert (answer.status, answer.error["code"]) == (408, "body_timeout")
            assert (answer.headers["connection"], answer.headers["x-tiergate-reason"]) == ("close", "body_timeout")
            await closed(client)
        await closed(silent)
        dripping.cancel()
        resting.send(LIVEZ)
        assert (await resting.response()).status == 200


async def test_half_a_request_behind_a_call_is_not_waited_for_when_the_call_is_over(gate: Running) -> None:
    async with connected(gate.api) as client:
        client.send(call(tokens=3) + HEAD)
        assert (await client.response()).done
        assert (await client.response()).status == 408
        await closed(client)


EARLY = {
    "no key": (401, request("POST", CHAT, b"{", content_length="500")),
    "too large": (413, request("POST", CHAT, b"{", "key-acme", content_length="900000000")),
    "no such path": (404, request("POST", "/v1/nothing", b"{", "key-acme", content_length="500")),
    "not JSON": (415, request("POST", CHAT, b"{", "key-acme", content_length="500", content_encoding="gzip")),
    "models": (200, request("GET", "/v1/models", b"{", "key-acme", content_length="500")),
    "in chunks": (401, request("POST", CHAT, b"1\r\n{\r\n", content_length="", transfer_encoding="chunked")),
    "an expected 100": (401, request("POST", CHAT, content_length="500", expect="100-continue")),
}


async def test_an_answer_before_the_body_is_there_is_the_last(gate: Running, subtests: pytest.Subtests) -> None:
    async with AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(connected(gate.api)) for name in EARLY}
        for name, (status, raw) in EARLY.items():
            with subtests.test(name):
                client = clients[name]
                client.send(raw)
                answer = await client.response()
                assert (answer.status, answer.headers["connection"]) == (status, "close")
                await closed(client)  # our side; what follows goes nowhere
                client.send(b"x" * 499 + LIVEZ)
        for client in clients.values():
            await until(lambda client=client: is_cut(client), SLOW + SOON)  # type: ignore[misc]


async def test_an_early_refusal_reaches_a_client_that_goes_on_sending(gate: Running) -> None:
    async with connected(gate.api) as client:
        client.send(request("POST", CHAT, b"{", content_length="9000000"))
        await client.reader.readuntil(b"\r\n")
        for _ in range(8):
            client.send(b"x" * 1_000_000)
            await drained(client)
        await closed(client, b"unauthenticated")


async def test_a_body_that_stops_is_told_so_and_the_connection_ends(gate: Running) -> None:
    async with connected(gate.api) as client:
        client.send(request("POST", CHAT, b"{", "key-acme", content_length="500"))
        answer = await client.response()
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        await closed(client)


async def test_a_refusal_of_a_whole_request_leaves_the_connection_open(gate: Running) -> None:
    async with connected(gate.api) as client:
        for _ in range(2):
            client.post(chat(), key="wrong")
            answer = await client.response()
            assert (answer.status, "connection" in answer.headers) == (401, False)


@pytest.mark.parametrize("last", [True, False])
async def test_a_client_that_never_takes_its_answer_is_cut(last: bool) -> None:
    """Whoever serves it: calls have a bound of their own, answers about models or metrics do not."""
    loop = asyncio.get_running_loop()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"connection", b"close")] if last else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * (16 << 20), "more_body": not last})
        if not last:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    port = listener("127.0.0.1", 0, "")
    server = EmbeddedServer(app, SLOW)
    serving = loop.create_task(server.serve([port]))
    await server.up.wait()
    try:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, port.getsockname())
            await loop.sock_sendall(client, LIVEZ)
            await until(lambda: bool(server.server_state.total_requests or server.server_state.tasks))
            await until(lambda: not server.server_state.connections, (1.6 if last else 3.0) * SLOW)
    finally:
        server.should_exit = True
        await serving


H2C: dict[str, Any] = {
    "connection": "Upgrade, HTTP2-Settings",
    "upgrade": "h2c",
    "http2_settings": "AAEAAEAAAAIAAAABAAMAAABk",
}
UPGRADES = {"h2c": H2C, "websocket": {"connection": "upgrade", "upgrade": "websocket", "sec_websocket_version": "13"}}


async def test_the_wish_to_upgrade_is_ignored(small: Engine, gate: Running, subtests: pytest.Subtests) -> None:
    """Java's HttpClient asks for h2c with every first request, its body right behind."""
    for name, size in product(UPGRADES, (1, 7, 100, 100_000)):
        headers = UPGRADES[name]
        raw = call(stream=False, tokens=2, **headers) + call(tokens=2, **headers) + request("GET", "/livez", **headers)
        with subtests.test(name, size=size):
            async with connected(gate.api) as client:
                for at in range(0, len(raw), size):
                    client.send(raw[at : at + size])
                    await asyncio.sleep(0)
                answers = [await client.response() for _ in range(3)]
            assert [each.status for each in answers] == [200] * 3
            assert answers[1].done
            assert [body["max_tokens"] for body in small.bodies()[-2:]] == [2, 2]


async def test_an_upgrade_in_chunks(gate: Running) -> None:
    body = json.dumps(chat(max_tokens=2)).encode()
    head = request("POST", CHAT, b"", "key-acme", content_length="", transfer_encoding="chunked", **H2C)
    assert (await exchange(gate.api, head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))).status == 200


@pytest.mark.parametrize("keep", ["", "keep-alive"])
async def test_http_1_0_gets_no_chunks(gate: Running, keep: str) -> None:
    async with connected(gate.api) as client:
        client.send(call(tokens=4, connection=keep).replace(b"HTTP/1.1", b"HTTP/1.0"))
        answer = await client.head()
        assert not {"transfer-encoding", "content-length"} & set(answer.headers)
        assert answer.headers["connection"] == "close"
        answer.body = await client.reader.read()
        assert answer.done
        assert len(answer.text().split()) == 4
    plain = await exchange(gate.api, call(stream=False, tokens=4).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert (plain.status, plain.headers["content-length"]) == (200, str(len(plain.body)))
    refused = await exchange(gate.api, b"GET /v1/models HTTP/1.0\r\n\r\n")
    assert refused.error["code"] == "unauthenticated"


NO_HTTP = {
    "garbage": b"\x00\x01\x02garbage\r\n\r\n",
    "TLS": bytes.fromhex("16030100a5010000a1030300"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no method": b"BREW / HTTP/1.1\r\n\r\n",
    "a bad header": HEAD + b"x y: z\r\n\r\n",
    "a folded header": HEAD + b"x: y\r\n z\r\n\r\n",
    "two lengths": request("POST", CHAT, b"{}", "key-acme", Content_Length="1"),
    "length and chunks": request("POST", CHAT, b"{}", "key-acme", transfer_encoding="chunked"),
    "a negative length": request("POST", CHAT, b"{}", "key-acme", content_length="-5"),
    "a bad path": b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
    "a bad address": b"GET http://[ HTTP/1.1\r\nhost: x\r\n\r\n",
    "a tunnel": b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
    "a bad chunk": request("POST", CHAT, b"zz\r\n", "key-acme", content_length="", transfer_encoding="chunked"),
    "a bad chunk unasked": request(
        "POST", CHAT, b"z", "key-acme", transfer_encoding="chunked", content_length=""
    ).replace(b"host", b"expect: 100-continue\r\nhost"),
}


async def test_what_is_no_http_is_told_so_in_openai_s_shape(gate: Running, subtests: pytest.Subtests) -> None:
    for name, port in product(NO_HTTP, ("api", "ops")):
        with subtests.test(name, port=port):
            async with connected(getattr(gate, port)) as client:
                client.send(NO_HTTP[name])
                await malformed(client)


async def test_a_bad_chunk_in_the_middle_of_a_body_ends_its_call(gate: Running) -> None:
    async with connected(gate.api) as client:
        client.send(request("POST", CHAT, b"1\r\n{\r\n", "key-acme", content_length="", transfer_encoding="chunked"))
        await eventually(lambda: reading(gate))
        client.send(b"zz\r\n")
        await malformed(client, "chunk size")
        assert (await gate.logged())[0]["reason"] == "client_gone"


async def test_the_gateway_stops_at_once_whatever_connections_are_doing(small: Engine) -> None:
    async with (
        running(configured([small.port])) as gate,
        connected(gate.api) as silent,
        connected(gate.api) as half,
        connected(gate.api) as parting,
        connected(gate.api) as faulty,
    ):
        half.send(HEAD)
        parting.send(EARLY["no key"][1])
        assert (await parting.response()).status == 401
        faulty.send(NO_HTTP["a bad chunk"])
        assert (await faulty.response()).status == 400
        assert (await get(gate.api, "/livez")).status == 200
        async with asyncio.timeout(2 * SOON):
            await gate.gateway.drain()
        for client in (silent, half, parting, faulty):
            await closed(client)


async def malformed(client: Client, told: str = "") -> None:
    """The whole answer to what is no request, and the end of the connection."""
    answer: Response = await client.response()
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
    assert (answer.headers["connection"], answer.headers["x-tiergate-reason"]) == ("close", "malformed")
    assert "date" in answer.headers
    error = answer.error
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "malformed")
    assert told in error["message"]
    await closed(client)


async def closed(client: Client, tail: bytes = b"") -> None:
    """The gateway closes its side, properly; `tail` is in what it said until then."""
    async with asyncio.timeout(DEADLINE):
        assert tail in (rest := await client.reader.read())
    assert tail or not rest


async def drained(client: Client) -> None:
    """All is on its way; a gateway that closed already is no fault here."""
    transport = client.writer.transport
    await until(lambda: not transport.get_write_buffer_size() or transport.is_closing())


async def drip(client: Client) -> None:
    """A header without an end, slowly."""
    while True:
        client.send(b"x: y\r\n")
        await asyncio.sleep(0.05)


async def reading(gate: Running) -> bool:
    """Whether a call is inside; its body may still be on the way."""
    return bool(gate.gateway._calls.under_way)


def is_cut(client: Client) -> bool:
    """Whether the gateway closed both sides, as a client learns by sending."""
    client.send(b"x")
    return client.writer.transport.is_closing()
