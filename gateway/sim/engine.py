"""The step model of a vLLM engine: continuous batching, chunked prefill, KV blocks, preemption; no clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from gateway.sim.profile import Profile
from gateway.sim.waiting import ArrivalLine, Finish, Line, PriorityLine, Request, Sequence


class Rejection(Enum):
    """The engine's own admission limits: (label of its metric, text of its 503)."""

    REQUESTS = (
        "max_num_queued_reqs",
        "The engine is currently busy and cannot accept new requests. "
        "Please try again later or on a different instance.",
    )
    TOKENS = (
        "max_num_queued_tokens",
        "The engine has reached its prefill token backlog limit. Please try again later or on a different instance.",
    )

    def __init__(self, label: str, message: str) -> None:
        self.label = label
        self.message = message


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step: it takes `duration` seconds, and when it ends each of `tokens` has one more token.

    `tokens` pairs a request id with why it finished, None while it goes on. `started` were scheduled for the first
    time, `preempted` lost their KV. An aborted request may still be in a result that was returned before the abort.
    """

    duration: float
    tokens: list[tuple[str, Finish | None]]
    started: list[str]
    preempted: list[str]
    prefill_tokens: int
    decode_tokens: int


@dataclass(slots=True)
class _Plan:
    budget: int
    scheduled: list[tuple[Sequence, int]] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)


class Engine:
    """Generates tokens for requests in steps; the caller owns time: it waits `duration`, then calls `step` again.

    Rules as in vLLM's V1 scheduler. Running sequences are served first, in order: one token for each that decodes,
    prefill chunks from what is left of the token budget. Too few blocks: the last of running (fcfs) or the one with
    the highest (priority, arrival) is preempted and recomputed later. Waiting ones join only in a step without
    preemption, while budget and places are left and the whole prompt of the next one fits.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.preemptions = 0
        self._by_id: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._waiting: Line = PriorityLine() if profile.scheduling == "priority" else ArrivalLine()
        self._free = profile.blocks
        self._entries = 0

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not self._by_id

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences not in the batch: new ones and preempted ones."""
        return len(self._waiting)

    @property
    def used_blocks(self) -> int:
        """KV blocks held by running sequences."""
        return self.profile.blocks - self._free

    @property
    def kv_usage(self) -> float:
        """Part of the KV blocks in use, 0 to 1."""
        return self.used_blocks / self.profile.blocks

    @property
    def prefill_backlog(self) -> int:
        """Prompt tokens of the requests that have not emitted yet, counted whole as vLLM does; O(requests)."""
        return sum(each.request.prompt_tokens for each in self._by_id.values() if not each.generated)

    def refuses(self, sequences: int = 1) -> Rejection | None:
        """Whether the engine's own limits forbid that many more sequences now."""
        most, most_tokens = self.profile.max_queued_reqs, self.profile.max_queued_tokens
        if most is not None and len(self._by_id) + sequences > most:
            return Rejection.REQUESTS
        if most_tokens is not None and self.prefill_backlog >= most_tokens:
            return Rejection.TOKENS
        return None

    def add(self, *requests: Request) -> Rejection | None:
        """Let the sequences of one call wait, all or none, or tell which limit forbids it.

        Raises ValueError for an id in use, a size under 1, or a request that could never fit the KV cache.
        """
        for request in requests:
            self._check(request)
        rejection = self.refuses(len(requests))
        if rejection is not None:
            return rejection
        for request in requests:
            self._entries += 1
            sequence = Sequence(request, self._entries, request.prompt_tokens)
            self._by_id[request.id] = sequence
            self._waiting.put(sequence)
        return None

    def abort(self, request_id: str) -> bool:
        """Drop a request and its blocks at once; False where it is unknown or over."""
        sequence = self._by_id.pop(request_id, None)
        if sequence is None:
            return False
        if sequence.blocks:  # exactly the running ones hold blocks
            self._running.remove(sequence)
            self._release(sequence)
        else:
            self._waiting.take(sequence)
        return True

    def step(self) -> StepResult:
        """Do one step and tell how long it takes; the state is that at its end. Idle: nothing, in `t0` seconds."""
        plan = _Plan(self.profile.max_num_batched_tokens)
        self._serve_running(plan)
        if not plan.preempted:
            self._serve_waiting(plan)
        return self._carry_out(plan)

    def _check(self, request: Request) -> None:
        if request.id in self._by_id:
            raise ValueError(f"request {request.id} exists")
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError(f"request {request.id}: prompt and output must have at least one token")
        # The last token is emitted, never computed.
        if self._blocks_for(request.prompt_tokens + request.output_tokens - 1) > self.profile.blocks:
            raise ValueError(f"request {request.id} can never fit the KV cache")

    def _serve_running(self, plan: _Plan) -> None:
        size, running, scheduled = self.profile.block_size, self._running, plan.scheduled
        # All before position len(scheduled) are planned, so that is the next one even after a preemption among them.
        while plan.budget and len(scheduled) < len(running):
            sequence = running[len(scheduled)]
            tokens = min(sequence.length - sequence.computed, plan.budget)
            if sequence.computed + tokens > sequence.blocks * size and not self._make_room(sequence, tokens, plan):
                return
            scheduled.append((sequence, tokens))
            plan.budget -= tokens

    def _make_room(self, sequence: Sequence, tokens: int, plan: _Plan) -> bool:
        more = self._blocks_for(sequence.computed + tokens) - sequence.blocks
        while more > self._free:
            victim = self._victim()
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        self._free -= more
        sequence.blocks += more
        return True

    def _victim(self) -> Sequence:
        if self.profile.scheduling == "priority":
            return max(self._running, key=lambda sequence: sequence.rank)
        return self._running[-1]

    def _preempt(self, victim: Sequence, plan: _Plan) -> None:
        for position, (sequence, tokens) in enumerate(plan.scheduled):
            if sequence is victim:
                del plan.scheduled[position]
                plan.budget += tokens
                break
        self._running.remove(victim)
        self._release(victim)
        victim.computed = 0
        victim.preempted = True
        self._waiting.put_back(victim)
        self.preemptions += 1
        plan.preempted.append(victim.request.id)

    def _serve_waiting(self, plan: _Plan) -> None:
        while plan.budget and len(self._running) < self.profile.max_num_seqs:
            sequence = self._waiting.head()
            if sequence is None or self._blocks_for(sequence.length) > self._free:
                return
            self._waiting.take(sequence)
            tokens = min(sequence.length, plan.budget)
            sequence.blocks = self._blocks_for(tokens)
            self._free -= sequence.blocks
            self._running.append(sequence)
            plan.scheduled.append((sequence, tokens))
            plan.budget -= tokens
            if not sequence.preempted:
                plan.started.append(sequence.request.id)

    def _carry_out(self, plan: _Plan) -> StepResult:
        prefill = decode = context = 0
        attention = 0.0
        emitted: list[tuple[str, Finish | None]] = []
        finished = False
        for sequence, tokens in plan.scheduled:
            if sequence.generated and sequence.computed + 1 == sequence.length:
                decode += 1
                context += sequence.length
            else:
                prefill += tokens
                attention += tokens * (sequence.computed + tokens / 2)
            sequence.computed += tokens
            if sequence.computed == sequence.length:
                sequence.generated += 1
                sequence.length += 1
                request = sequence.request
                over = sequence.generated == request.output_tokens
                emitted.append((request.id, request.finish if over else None))
                finished = finished or over
        if finished:
            self._retire()
        profile = self.profile
        seconds = (
            profile.t0 + profile.a * prefill + profile.b * decode + profile.c * context + profile.q * attention
        ) / profile.speed
        return StepResult(seconds, emitted, plan.started, plan.preempted, prefill, decode)

    def _retire(self) -> None:
        still: list[Sequence] = []
        for sequence in self._running:
            if sequence.generated == sequence.request.output_tokens:
                self._release(sequence)
                del self._by_id[sequence.request.id]
            else:
                still.append(sequence)
        self._running = still

    def _release(self, sequence: Sequence) -> None:
        self._free += sequence.blocks
        sequence.blocks = 0

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.profile.block_size)
