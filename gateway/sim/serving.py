"""Puts calls into the engine, hands its tokens to their answers, and takes abandoned calls out again."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from uuid import UUID, uuid5

from gateway.sim.answers import Answer, StreamedAnswer, Turn, WholeAnswer
from gateway.sim.asked import Asked
from gateway.sim.clock import StepClock
from gateway.sim.engine import Engine, StepResult
from gateway.sim.faults import Faults
from gateway.sim.http import Connection
from gateway.sim.metrics import EngineMetrics
from gateway.sim.profile import Profile
from gateway.sim.speech import utterance
from gateway.sim.waiting import Finish, Request
from gateway.sim.wire import ChatWire, CompletionWire, Wire, compact, error_fields

_NAMESPACE = UUID("6d9a1f0e-3b4c-4c1e-9f65-0d5f1f6f2a10")


class Serving:
    """One engine at work on an event loop. `faults` may be replaced at any time; then call `clock.thaw`."""

    def __init__(self, profile: Profile, model: str, seed: int) -> None:
        self.engine = Engine(profile)
        self.metrics = EngineMetrics(model, time.time())
        self.faults = Faults()
        self.clock = StepClock(self.engine, lambda: self.faults, self._deliver)
        self.aborted = 0
        self._model = model
        self._seed = seed
        self._calls = 0
        self._loop = asyncio.get_running_loop()
        self._turns: dict[str, tuple[Turn, Answer]] = {}

    @property
    def in_flight(self) -> int:
        """Sequences not yet answered."""
        return len(self._turns)

    def accept(self, asked: Asked, connection: Connection, load_format: str) -> None:
        """Serve a call on its connection, or answer 503 where the engine's own limits forbid it."""
        self._calls += 1
        turns = self._planned(asked)
        rejection = self.engine.add(*(self._request(asked, turn) for turn in turns))
        if rejection is not None:
            self.metrics.rejected[rejection] += 1
            connection.reply(503, compact(error_fields(503, rejection.message)))
            return
        wire = self._wire(asked)
        answer: Answer
        if asked.stream:
            bad = self.faults.next_break()
            answer = StreamedAnswer(
                connection, wire, turns, include_usage=asked.include_usage, bad=bad, give_up=self._drop
            )
        else:
            answer = WholeAnswer(connection, wire, turns, partial(self._load_header, load_format))
        connection.on_gone = partial(self._drop, answer)
        for turn in turns:
            self._turns[turn.id] = (turn, answer)
        self.clock.wake()

    def _planned(self, asked: Asked) -> list[Turn]:
        now = self._loop.time()
        seed = f"call {self._seed} {self._calls}" if asked.seed is None else f"asked {asked.seed}"
        turns = []
        for prompt, (tokens, limit) in enumerate(zip(asked.prompts, asked.limits, strict=True)):
            for choice in range(asked.choices):
                index = prompt * asked.choices + choice
                # The engine always makes one token; where none is allowed it is not shown.
                silent = limit == 0
                said = utterance(f"{seed} {tokens} {index}", max(1, limit), asked.ignore_eos or silent)
                turns.append(Turn(f"{self._calls}.{index}", index, tokens, said, now, silent))
        return turns

    def _request(self, asked: Asked, turn: Turn) -> Request:
        said = turn.utterance
        return Request(turn.id, turn.prompt_tokens, said.tokens, asked.priority, turn.arrived, said.finish)

    def _wire(self, asked: Asked) -> Wire:
        kind, prefix = (ChatWire, "chatcmpl") if asked.chat else (CompletionWire, "cmpl")
        made = asked.id or uuid5(_NAMESPACE, f"{self._seed} {self._calls}").hex[:16]
        return kind(
            f"{prefix}-{made}", int(time.time()), self._model, prompt_tokens=sum(asked.prompts),
            choices=asked.sequences, include_usage=asked.include_usage, continuous=asked.continuous_usage,
        )  # fmt: skip

    def _load_header(self, kind: str) -> str:
        waiting, usage = float(self.engine.waiting), self.engine.kv_usage
        if kind.lower() == "json":
            named = f'"num_requests_waiting": {waiting}, "kv_cache_usage_perc": {usage}'
            return f'endpoint-load-metrics: JSON {{"named_metrics": {{{named}}}}}\r\n'
        if kind.lower() == "text":
            named = f"named_metrics.num_requests_waiting={waiting}, named_metrics.kv_cache_usage_perc={usage}"
            return f"endpoint-load-metrics: TEXT {named}\r\n"
        return ""

    def _deliver(self, result: StepResult, begun: float, now: float) -> None:
        for turn_id in result.started:
            if turn_id in self._turns:
                self.metrics.queued.observe(max(0.0, begun - self._turns[turn_id][0].arrived))
        for turn_id, finish in result.tokens:
            entry = self._turns.get(turn_id)
            if entry is None:  # aborted while the step ran
                continue
            turn, answer = entry
            turn.generated += 1
            self._measure(turn, finish, now)
            if finish is not None:
                del self._turns[turn_id]
            answer.token(turn, finish)

    def _measure(self, turn: Turn, finish: Finish | None, now: float) -> None:
        metrics = self.metrics
        metrics.generation_tokens += 1
        if turn.generated == 1:
            metrics.prompt_tokens += turn.prompt_tokens
            metrics.first_token.observe(now - turn.arrived)
        else:
            metrics.inter_token.observe(now - turn.emitted_at)
        turn.emitted_at = now
        if finish is not None:
            metrics.finish(finish, now - turn.arrived, turn.prompt_tokens, turn.counted)

    def _drop(self, answer: Answer) -> None:
        """Abort what is left of a call: its client is gone, or its stream was spoilt."""
        left = [turn for turn in answer.turns if self._turns.pop(turn.id, None) is not None]
        for turn in left:
            self.engine.abort(turn.id)
        self.aborted += len(left)
