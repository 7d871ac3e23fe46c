"""The path of a request, in order: caps, tier, then three nested leases (quota, slot, upstream), then the relay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from gateway.core.caps import apply_caps
from gateway.core.fairqueue import Ticket
from gateway.core.health import FailureKind
from gateway.core.limit import Sample
from gateway.core.outputs import OutputLengths, real_cost
from gateway.core.policy import Policy
from gateway.core.quota import Remaining
from gateway.core.refusal import Reason, Refusal, Refused, granted
from gateway.core.rewrite import engine_body
from gateway.core.tiering import PoolFacts, TierChoice
from gateway.core.types import Band, Call, Outcome, Record, Usage
from gateway.dispatch import Dispatcher, Slot
from gateway.store.memory import Account, MemoryQuota
from gateway.upstream.pool import Pool
from gateway.upstream.relay import EngineError, Relay
from gateway.upstream.wire import Outgoing, UpstreamFailed

Header = tuple[bytes, bytes]

_CLIENT_ERROR, _SERVER_ERROR = 400, 500
_NOT_THE_CALLERS = frozenset({401, 403, 407, 429})  # about the gateway's own credentials and load, not the caller's
_PASSED_HEADERS = frozenset({b"content-type", b"cache-control", b"endpoint-load-metrics"})
_BUSY_RETRY, _GONE_RETRY = 2.0, 5.0

_ENGINE_PRIORITY = {Band.ONLINE: 0, Band.BATCH: 10}  # vLLM: lower goes first
_TIMEOUTS = frozenset({FailureKind.TIMEOUT_FIRST, FailureKind.TIMEOUT_GAP})


class Quotas(Protocol):
    """What the path needs of a quota account: what is left, for the answer's headers."""

    @property
    def remaining(self) -> tuple[Remaining | None, Remaining | None]:
        """Requests and tokens left."""


class Reply(Protocol):
    """The client's end of a call; both server faces speak to it. `account` is set once quota was looked at."""

    account: Quotas | None

    async def start(self, status: int, headers: list[Header], length: int | None) -> None:
        """Status and headers; from here on nothing can be refused. `length` in bytes, None: until `end`."""

    async def write(self, data: bytes) -> None:
        """Body bytes; returns when the client can take more."""

    async def end(self) -> None:
        """The answer is complete."""

    async def break_off(self, reason: Reason, message: str) -> None:
        """The answer cannot be completed: an SSE error event and a closed stream, without [DONE]."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One pool's parts, and what its engines want of a request (`first_token`, `inter_token` in seconds)."""

    pool: str
    dispatcher: Dispatcher
    upstream: Pool
    outputs: OutputLengths
    window: int | None = None
    headers: tuple[Header, ...] = ()
    priority_scheduling: bool = False
    first_token: float | None = 60.0
    inter_token: float = 0.25


class Pipeline:
    """Takes a parsed call all the way and leaves nothing behind, however it ends."""

    def __init__(
        self,
        policy_for: Callable[[Call], Policy],
        lanes: Mapping[str, Lane],
        quota: MemoryQuota,
        clock: Callable[[], float],
    ) -> None:
        self._policy_for = policy_for
        self._lanes = lanes
        self._quota = quota
        self._clock = clock
        self._serial = count()

    async def handle(self, asked: Call, reply: Reply, record: Record) -> None:
        """Serve `asked`; raises Refused, only before the first byte. `record` is filled in on the way."""
        policy = self._policy_for(asked)
        call = granted(apply_caps(asked, asked.tenant.caps))
        choice = granted(policy.tiers.route(call, self.facts()))
        call, lane = choice.call, self._lanes[choice.pool]
        _note_choice(record, policy, choice)
        account, slot = self._quota.reserved(call), lane.dispatcher.slot(self._ticket(call, lane), call.patience)
        reply.account = account
        try:
            async with account, slot, self._opened(choice, lane, slot, record) as relay:
                _check_status(relay, account)
                try:
                    await _relayed(relay, reply, record)
                finally:
                    self._settle(call, lane, account, slot, relay, record)
        except UpstreamFailed as failed:
            raise Refused(_unanswered(failed, record)) from failed
        except EngineError as error:
            await _engine_refused(error, reply, record)

    def facts(self) -> dict[str, PoolFacts]:
        """Window and saturation of every pool, now."""
        return {
            name: PoolFacts(lane.window or lane.upstream.window, lane.dispatcher.admission.saturation)
            for name, lane in self._lanes.items()
        }

    def _ticket(self, call: Call, lane: Lane) -> Ticket:
        # A serial number, not the caller's request id: two calls may carry the same one.
        return Ticket(
            id=str(next(self._serial)),
            tenant=call.tenant.name,
            band=call.band,
            arrived=self._clock(),
            cost=lane.outputs.expected_cost(call),
            weight=call.tenant.weight,
            slots=call.choices,
        )

    def _opened(self, choice: TierChoice, lane: Lane, slot: Slot, record: Record) -> AbstractAsyncContextManager[Relay]:
        """The upstream lease: an endpoint is picked and the request sent when it is entered."""
        call, now = choice.call, self._clock()
        record.wait = slot.wait
        record.overhead = now - call.arrived - slot.wait
        priority = _ENGINE_PRIORITY[call.band] if lane.priority_scheduling else None
        outgoing = Outgoing(
            b"POST",
            call.path.encode(),
            (*lane.headers, (b"content-type", b"application/json"), (b"x-request-id", call.id.encode())),
            engine_body(call, choice.model, priority),
        )
        return lane.upstream.opened(
            outgoing, stream=call.stream, hide_usage=not call.wants_usage, first_timeout=_first_timeout(call, lane, now)
        )

    def _settle(self, call: Call, lane: Lane, account: Account, slot: Slot, relay: Relay, record: Record) -> None:
        """Tell quota, fairness and the limit what the call really used; also when it was broken off."""
        usage = relay.usage or _counted(call, relay)
        account.used = record.usage = usage
        record.endpoint, record.attempts = relay.endpoint, relay.attempts
        record.inter_token = relay.inter_token
        first = self._clock() if relay.first_token_at is None else relay.first_token_at
        sent = call.arrived + record.overhead + slot.wait
        record.first_token = first - call.arrived if relay.streaming else None
        slot.sample = Sample(
            inflight=lane.dispatcher.admission.inflight,
            first_token=first - sent if relay.streaming else None,
            inter_token=relay.inter_token,
            cost=real_cost(usage),
        )
        if relay.finished:
            lane.outputs.learn(call.tenant.name, usage.completion // call.choices)


def _note_choice(record: Record, policy: Policy, choice: TierChoice) -> None:
    record.release, record.route, record.tier = policy.release, choice.route, choice.tier
    record.pool, record.why, record.clamped = choice.pool, choice.why, choice.call.clamped
    record.prompt_estimate = choice.call.prompt.tokens


def _check_status(relay: Relay, account: Account) -> None:
    """An engine's refusal is no answer: it counts as a request of the caller if the caller was at fault."""
    if relay.good:
        return
    if _is_the_callers(relay.status):
        account.used = Usage()
    error = EngineError(relay.status, relay.body, retryable=False, verdict=relay.verdict)
    error.endpoint, error.attempts = relay.endpoint, relay.attempts
    raise error


async def _relayed(relay: Relay, reply: Reply, record: Record) -> None:
    """Every byte of the answer to the client; a failure on the way becomes an error event."""
    record.status = relay.status
    await reply.start(relay.status, _passed_on(relay.headers), None if relay.streaming else len(relay.body))
    try:
        while data := await relay.read():
            await reply.write(data)
    except UpstreamFailed as failed:
        reason = _reason_of(failed)
        record.outcome, record.reason, record.detail = reason.outcome, reason.code, failed.detail
        await reply.break_off(reason, "The engine stopped in the middle of the answer.")
        return
    if relay.failed:
        record.outcome, record.reason = Outcome.FAILED, Reason.UPSTREAM_ERROR.code
    await reply.end()


async def _engine_refused(error: EngineError, reply: Reply, record: Record) -> None:
    """The engine answered, but with an error: its own 4xx passes as it is, anything else is ours to explain."""
    record.endpoint, record.attempts, record.detail = error.endpoint, error.attempts, f"engine {error.status}"
    if not _is_the_callers(error.status):
        raise Refused(_explained(error.status))
    record.status, record.outcome, record.reason = error.status, Outcome.REFUSED, "engine_refused"
    await reply.start(error.status, [(b"content-type", b"application/json")], len(error.body))
    await reply.write(error.body)
    await reply.end()


def _is_the_callers(status: int) -> bool:
    return _CLIENT_ERROR <= status < _SERVER_ERROR and status not in _NOT_THE_CALLERS


def _explained(status: int) -> Refusal:
    if status == Reason.PAST_KNEE.status:
        return Refusal(Reason.PAST_KNEE, "The engines are busy and take no more calls.", retry_after=_BUSY_RETRY)
    return Refusal(Reason.UPSTREAM_ERROR, "The engine failed before it began to answer.", retry_after=_BUSY_RETRY)


def _unanswered(failed: UpstreamFailed, record: Record) -> Refusal:
    """No engine answered: the caller learns that and no more, the log learns which and why."""
    record.endpoint, record.attempts, record.detail = failed.endpoint, failed.attempts, str(failed)
    reason = _reason_of(failed)
    if reason is Reason.UPSTREAM_TIMEOUT:
        return Refusal(reason, "The engine did not answer in time.", retry_after=_BUSY_RETRY)
    if reason is Reason.NO_ENDPOINT:
        return Refusal(reason, "No engine of this pool can be reached.", retry_after=_GONE_RETRY)
    return Refusal(reason, "The engine failed before it began to answer.", retry_after=_BUSY_RETRY)


def _reason_of(failed: UpstreamFailed) -> Reason:
    if failed.kind in _TIMEOUTS:
        return Reason.UPSTREAM_TIMEOUT
    return Reason.NO_ENDPOINT if failed.kind is FailureKind.CONNECT else Reason.UPSTREAM_ERROR


def _counted(call: Call, relay: Relay) -> Usage:
    """The engine told no usage (it was broken off): the prompt as estimated, and a token for each event that came."""
    return Usage(call.prompt.tokens, max(0, relay.events - 1), estimated=True)


def _first_timeout(call: Call, lane: Lane, now: float) -> float | None:
    """Seconds from now to the first token; a plain answer comes only when all of it is there, so it gets longer."""
    limit = lane.first_token
    if call.patience is not None:
        left = max(0.001, call.arrived + call.patience - now)
        limit = left if limit is None else min(limit, left)
    if limit is None or call.stream:
        return limit
    return limit + (call.max_tokens or 0) * lane.inter_token


def _passed_on(headers: list[Header]) -> list[Header]:
    return [header for header in headers if header[0] in _PASSED_HEADERS]
