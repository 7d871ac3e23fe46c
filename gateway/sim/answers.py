"""Turns the tokens of one call's sequences into its answer: a stream of events, or one body."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from gateway.sim.engine import Rejection
from gateway.sim.faults import Break
from gateway.sim.http import Connection
from gateway.sim.speech import Utterance
from gateway.sim.waiting import Finish
from gateway.sim.wire import DONE, Wire, error_chunks

ENGINE_DIED = "EngineCore encountered an issue. See stack trace (above) for the root cause."


@dataclass(slots=True)
class Turn:
    """One sequence of a call while it is generated; times in seconds on the loop's clock.

    `silent`: the prompt fills the window, so that not one token may come out.
    """

    id: str
    index: int
    prompt_tokens: int
    utterance: Utterance
    arrived: float
    silent: bool = False
    generated: int = 0
    emitted_at: float = 0.0

    @property
    def counted(self) -> int:
        """Tokens reported as usage."""
        return 0 if self.silent else self.generated

    def newest(self, finish: Finish | None) -> str:
        """Text of the token that just came; the one that ends by "stop" is the end-of-text token, which has none."""
        if finish is Finish.STOP or self.silent:
            return ""
        return self.utterance.voice.word(self.generated - 1)

    def text(self) -> str:
        """All of a finished sequence's text."""
        spoken = self.counted - (self.utterance.finish is Finish.STOP)
        return self.utterance.voice.text(spoken)


class Answer(Protocol):
    """One call's answer in the making. `token` is told of each token after `turn.generated` counts it."""

    turns: list[Turn]

    def token(self, turn: Turn, finish: Finish | None) -> None:
        """Take in one more token of a turn, with the reason if it is that turn's last."""
        ...


class StreamedAnswer:
    """Server-sent events, each token as its own; the 200 leaves at once, before the engine admitted anything.

    `bad` spoils the stream in place of the token after its `after`; `give_up` then frees the engine.
    """

    def __init__(
        self, connection: Connection, wire: Wire, turns: list[Turn], *,
        include_usage: bool, bad: Break | None, give_up: Callable[[Answer], None],
    ) -> None:  # fmt: skip
        self.turns = turns
        self._connection = connection
        self._wire = wire
        self._include_usage = include_usage
        self._bad = bad
        self._give_up = give_up
        self._open = len(turns)
        self._out = 0
        connection.open_stream()

    def token(self, turn: Turn, finish: Finish | None) -> None:
        """Send one token, in one write with whatever belongs before or after it."""
        if self._bad is not None and self._out == self._bad.after:
            self._spoil(self._bad)
            return
        events = self._wire.token(turn.index, turn.newest(finish), turn.counted, finish)
        if not self._out:
            events = self._wire.opening() + events
        self._out += 1
        self._open -= finish is not None
        if self._open:
            self._connection.send(events)
            return
        if self._include_usage:
            events += self._wire.usage(sum(each.counted for each in self.turns))
        self._connection.end_stream(events + DONE)

    def _spoil(self, bad: Break) -> None:
        self._give_up(self)
        if bad.code is None:
            self._connection.cut(rst=bad.rst, flush=not bad.rst)
            return
        busy = bad.code == HTTPStatus.SERVICE_UNAVAILABLE
        message = Rejection.REQUESTS.message if busy else ENGINE_DIED
        self._connection.end_stream(error_chunks(bad.code, message))


class WholeAnswer:
    """One JSON body when all sequences are over; `load_header` gives the header line about the engine's load."""

    def __init__(self, connection: Connection, wire: Wire, turns: list[Turn], load_header: Callable[[], str]) -> None:
        self.turns = turns
        self._connection = connection
        self._wire = wire
        self._load_header = load_header
        self._open = len(turns)

    def token(self, turn: Turn, finish: Finish | None) -> None:
        """Answer if this was the last."""
        self._open -= finish is not None
        if self._open:
            return
        texts = [(each.text(), each.utterance.finish) for each in self.turns]
        body = self._wire.whole(texts, sum(each.counted for each in self.turns))
        headers = self._load_header() + "content-type: application/json\r\n"
        self._connection.reply(HTTPStatus.OK, body, headers)
