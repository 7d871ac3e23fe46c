"""The simulated vLLM server: routes of the OpenAI API, operations, faults on demand, and its life on a port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from math import inf

from gateway.sim.asked import (
    Invalid,
    Unreadable,
    chat_prompt,
    check_model,
    completion_prompts,
    read_generation,
    read_object,
)
from gateway.sim.engine import Rejection
from gateway.sim.faults import Answered, FaultError, Faults, MetricsMode, ordered
from gateway.sim.http import Connection, HttpRequest
from gateway.sim.metrics import BROKEN, CONTENT_TYPE
from gateway.sim.profile import Profile
from gateway.sim.serving import Serving
from gateway.sim.state import SeenRequest, SimState
from gateway.sim.wire import NOT_ALLOWED, NOT_FOUND, UNREADABLE, VERSION, compact, error_fields, model_list

_DRAINING = "cannot schedule new futures after shutdown"
_REMEMBERED, _REMEMBERED_BODY = 50, 65536
_PLAIN = "content-type: text/plain; charset=utf-8\r\n"

Route = Callable[[HttpRequest, Connection], None]


class SimServer:
    """One simulated engine behind an HTTP port; `start`, then `stop`, once each.

    Everything happens on the event loop that called `start`; the same seed and calls give the same answers.
    """

    def __init__(self, profile: Profile, model: str, *, seed: int = 0) -> None:
        self._profile = profile
        self._model = model
        self._seed = seed
        self._connections: set[Connection] = set()
        self._recent: deque[tuple[float, HttpRequest]] = deque(maxlen=_REMEMBERED)
        self._frozen_metrics: bytes | None = None
        self._listener: asyncio.Server | None = None
        self._bound: socket.socket | None = None
        self._relisten: asyncio.TimerHandle | None = None
        self._relistening: asyncio.Task[None] | None = None
        self._routes: dict[str, dict[str, Route]] = {
            "/v1/chat/completions": {"POST": partial(self._generate, chat=True)},
            "/v1/completions": {"POST": partial(self._generate, chat=False)},
            "/v1/models": {"GET": self._models},
            "/tokenize": {"POST": self._tokenize},
            "/health": {"GET": lambda _, connection: connection.reply(200, b"", "")},
            "/ping": {"GET": lambda _, connection: connection.reply(200, b"", "")},
            "/version": {"GET": lambda _, connection: connection.reply(200, compact({"version": VERSION}))},
            "/load": {"GET": self._load},
            "/metrics": {"GET": self._metrics},
            "/sim/state": {"GET": lambda _, connection: connection.reply(200, compact(asdict(self.state())))},
            "/sim/faults": {"GET": self._show_faults, "POST": self._order_faults},
        }

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; returns the port, a free one where 0 was asked. Raises OSError where it cannot be bound."""
        self._serving = Serving(self._profile, self._model, self._seed)
        self._bound = _bind(host, port)
        self._address: tuple[str, int] = (host, self._bound.getsockname()[1])
        await self._listen()
        return self._address[1]

    async def stop(self) -> None:
        """Close the port and every connection at once, answers in progress included."""
        self._serving.clock.stop()
        if self._relisten is not None:
            self._relisten.cancel()
        if self._relistening is not None:
            await self._relistening
        self._close_listener()
        if self._bound is not None:
            self._bound.close()
        # What was accepted a moment ago becomes a connection in the next turn of the loop.
        await asyncio.sleep(0)
        open_connections = list(self._connections)
        for connection in open_connections:
            connection.cut()
        await asyncio.gather(*(connection.closed for connection in open_connections))

    def inject(self, order: Mapping[str, object]) -> None:
        """Switch faults on or off, as POST /sim/faults does. Raises FaultError."""
        self._apply(json.dumps(order).encode())

    def state(self) -> SimState:
        """What GET /sim/state shows: load, counts, and the last calls with headers and bodies."""
        serving, engine = self._serving, self._serving.engine
        return SimState(
            running=engine.running,
            waiting=engine.waiting,
            in_flight=serving.in_flight,
            kv=engine.kv_usage,
            used_blocks=engine.used_blocks,
            preemptions=engine.preemptions,
            aborted=serving.aborted,
            finished=sum(serving.metrics.finished.values()),
            step=serving.clock.steps,
            connections=len(self._connections),
            requests=tuple(_seen(at, request) for at, request in self._recent),
        )

    async def _listen(self) -> None:
        assert self._bound is not None, "no port is bound"
        bound, self._bound = self._bound, None
        loop = asyncio.get_running_loop()
        protocol = partial(Connection, self._handle, self._profile.keepalive, self._connections)
        self._listener = await loop.create_server(protocol, sock=bound, backlog=1024)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _handle(self, request: HttpRequest, connection: Connection) -> None:
        if request.method == "POST" and not request.path.startswith("/sim/"):
            self._recent.append((time.time(), request))
        methods = self._routes.get(request.path)
        if methods is None:
            connection.reply(404, NOT_FOUND)
        elif request.method in methods:
            methods[request.method](request, connection)
        else:
            allow = f"allow: {', '.join(methods)}\r\ncontent-type: application/json\r\n"
            connection.reply(405, NOT_ALLOWED, allow)

    # The OpenAI API.

    def _generate(self, request: HttpRequest, connection: Connection, chat: bool) -> None:
        answered = self._serving.faults.next_answer()
        if answered is not None:
            message = answered.message or _message(answered)
            connection.reply(answered.status, compact(error_fields(answered.status, message)))
            return
        try:
            asked = read_generation(request, chat, self._model, self._profile)
        except Invalid as invalid:
            _refuse(connection, invalid)
        except Unreadable:
            connection.reply(400, UNREADABLE)
        else:
            self._serving.accept(asked, connection, request.headers.get("endpoint-load-metrics-format", ""))

    def _models(self, request: HttpRequest, connection: Connection) -> None:
        connection.reply(200, model_list(self._model, int(time.time()), self._profile.max_model_len))

    def _tokenize(self, request: HttpRequest, connection: Connection) -> None:
        try:
            body = read_object(request)
            check_model(body, self._model)
            sizes = chat_prompt(body, self._profile) if "messages" in body else completion_prompts(body, self._profile)
        except Invalid as invalid:
            _refuse(connection, invalid)
        except Unreadable:
            connection.reply(400, UNREADABLE)
        else:
            answer = {"count": sizes[0], "max_model_len": self._profile.max_model_len}
            connection.reply(200, compact({**answer, "tokens": list(range(sizes[0])), "token_strs": None}))

    # Operations.

    def _load(self, request: HttpRequest, connection: Connection) -> None:
        connection.reply(200, compact({"server_load": self._serving.in_flight}))

    def _metrics(self, request: HttpRequest, connection: Connection) -> None:
        faults = self._serving.faults
        if faults.metrics is MetricsMode.ERROR:
            connection.reply(500, b"Internal Server Error", _PLAIN)
        elif faults.metrics is MetricsMode.BROKEN:
            connection.reply(200, BROKEN, CONTENT_TYPE)
        elif faults.metrics is MetricsMode.SLOW:
            late = asyncio.get_running_loop().call_later(faults.metrics_delay, self._reply_metrics, connection)
            connection.on_gone = late.cancel
        else:
            self._reply_metrics(connection)

    def _reply_metrics(self, connection: Connection) -> None:
        serving = self._serving
        live = serving.metrics.render(serving.engine, serving.faults.metrics is MetricsMode.OLD_NAMES)
        connection.reply(200, self._frozen_metrics or live, CONTENT_TYPE)

    # Faults.

    def _show_faults(self, request: HttpRequest, connection: Connection) -> None:
        connection.reply(200, compact(self._serving.faults.shown()))

    def _order_faults(self, request: HttpRequest, connection: Connection) -> None:
        try:
            self._apply(request.body)
        except FaultError as error:
            connection.reply(400, compact(error_fields(400, str(error))))
        else:
            self._show_faults(request, connection)

    def _apply(self, order: bytes) -> None:
        serving = self._serving
        serving.faults = faults = ordered(serving.faults, order, asyncio.get_running_loop().time())
        if faults.metrics is not MetricsMode.FROZEN:
            self._frozen_metrics = None
        elif self._frozen_metrics is None:
            self._frozen_metrics = serving.metrics.render(serving.engine)
        serving.clock.thaw()
        self._follow_refusal(faults)

    def _follow_refusal(self, faults: Faults) -> None:
        loop = asyncio.get_running_loop()
        if self._relisten is not None:
            self._relisten.cancel()
            self._relisten = None
        if faults.refusing_until > loop.time():
            if self._listener is not None:
                self._close_listener()
                # Bound but not listening: connections are refused, and nobody else gets the port meanwhile.
                self._bound = _bind(*self._address)
            if faults.refusing_until != inf:
                self._relisten = loop.call_at(faults.refusing_until, self._listen_again)
        elif self._bound is not None:
            self._listen_again()

    def _listen_again(self) -> None:
        self._relistening = asyncio.get_running_loop().create_task(self._resume())

    async def _resume(self) -> None:
        await self._listen()
        # An order may have come in between.
        self._follow_refusal(self._serving.faults)


async def serve(
    profile: Profile, model: str, host: str, port: int, started: Callable[[int], None] = lambda bound: None
) -> None:
    """Run one simulated engine until SIGTERM, SIGINT or cancellation; `started` hears the port it listens on.

    Raises OSError where the port is taken.
    """
    server, stop, loop = SimServer(profile, model), asyncio.Event(), asyncio.get_running_loop()
    started(await server.start(host, port))
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        await stop.wait()
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        await asyncio.shield(server.stop())


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on what is accepted; without it, tokens wait for delayed ACKs.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    with contextlib.ExitStack() as undo:
        undo.callback(bound.close)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.setblocking(False)
        undo.pop_all()
    return bound


def _message(answered: Answered) -> str:
    return _DRAINING if answered.status == 500 else Rejection.REQUESTS.message


def _refuse(connection: Connection, invalid: Invalid) -> None:
    body = error_fields(invalid.status, invalid.message, invalid.param, invalid.kind)
    connection.reply(invalid.status, compact(body))


def _seen(at: float, request: HttpRequest) -> SeenRequest:
    body = request.body[:_REMEMBERED_BODY].decode("utf-8", "replace")
    return SeenRequest(at, request.method, request.path, request.headers, body)
