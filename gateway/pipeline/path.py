"""The path of a request, in order: caps, tier, then three nested leases (quota, slot, upstream), then the relay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import count

from gateway.core.caps import apply_caps
from gateway.core.fairqueue import Ticket
from gateway.core.limit import Sample
from gateway.core.outputs import OutputLengths, real_cost
from gateway.core.policy import Policy
from gateway.core.refusal import Refused, granted
from gateway.core.rewrite import engine_body
from gateway.core.tiering import PoolFacts, TierChoice
from gateway.core.types import Band, Call, Record, Usage
from gateway.dispatch import Dispatcher, Slot
from gateway.pipeline.answer import check_status, engine_refused, relayed, unanswered
from gateway.pipeline.keepalive import Keepalive
from gateway.pipeline.ports import Header, Reply
from gateway.store.memory import Account, MemoryQuota
from gateway.upstream.pool import Pool
from gateway.upstream.relay import EngineError, Relay
from gateway.upstream.wire import Outgoing, UpstreamFailed

_BATCH_PRIORITY = 10  # vLLM: lower goes first, and online calls go as 0


@dataclass(frozen=True, slots=True)
class Lane:
    """One pool's parts, and what its engines want of a request.

    `first_token`, `keepalive` and `inter_token` (what a plain answer may take for each token) in seconds.
    """

    pool: str
    dispatcher: Dispatcher
    upstream: Pool
    outputs: OutputLengths
    window: int | None = None
    headers: tuple[Header, ...] = ()
    priority_scheduling: bool = False
    first_token: float | None = 60.0
    inter_token: float = 0.25
    keepalive: float = 0.0


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
        pulse = Keepalive(reply, lane.keepalive if call.stream else 0.0)
        try:
            async with pulse, account, slot, self._opened(choice, lane, slot, record) as relay:
                await pulse.stop()
                check_status(relay, account)
                try:
                    await relayed(relay, reply, record)
                finally:
                    self._settle(call, lane, account, slot, relay, record)
        except Refused:
            record.wait = slot.wait or record.wait
            raise
        except UpstreamFailed as failed:
            raise Refused(unanswered(failed, record)) from failed
        except EngineError as error:
            await engine_refused(error, reply, record)

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
        outgoing = Outgoing(
            b"POST",
            call.path.encode(),
            (*lane.headers, (b"content-type", b"application/json"), (b"x-request-id", call.id.encode())),
            engine_body(call, choice.model, _priority(call) if lane.priority_scheduling else None),
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


def _priority(call: Call) -> int:
    return _BATCH_PRIORITY if call.band is Band.BATCH else 0


def _note_choice(record: Record, policy: Policy, choice: TierChoice) -> None:
    record.release, record.route, record.tier = policy.release, choice.route, choice.tier
    record.pool, record.why, record.clamped = choice.pool, choice.why, choice.call.clamped
    record.prompt_estimate = choice.call.prompt.tokens


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
