"""Configuration to parts: the one place where everything is put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.config.schema import Config
from gateway.config.serving import Pool as PoolSection
from gateway.core.admission import Admission, QueueRules
from gateway.core.classifier import CueScore
from gateway.core.health import HealthRules
from gateway.core.limit import Capacity, KneeLimit
from gateway.core.outputs import OutputLengths
from gateway.core.policy import Policy
from gateway.core.retry import RetryBudget
from gateway.core.tiering import Condition, Route, Rule, TierPool, TierRouter
from gateway.core.types import Call, Endpoint, Tenant
from gateway.dispatch import Dispatcher
from gateway.pipeline.path import Lane, Pipeline
from gateway.store.memory import MemoryQuota
from gateway.upstream.pool import Pool
from gateway.upstream.seat import Timeouts

_PATIENCE_PER_TOKEN = 4.0  # a plain answer may take this many inter-token SLOs for each token it may hold


@dataclass(frozen=True, slots=True)
class Parts:
    """What a running gateway is made of."""

    config: Config
    tenants: dict[str, Tenant]
    keys: dict[str, Tenant]
    policy: Policy
    lanes: dict[str, Lane]
    quota: MemoryQuota
    pipeline: Pipeline


def build(config: Config, clock: Callable[[], float], dice: Callable[[], float]) -> Parts:
    """All parts for `config`; nothing is started. `clock` in monotonic seconds, `dice` in [0, 1)."""
    tenants = {name: section.as_tenant(name) for name, section in config.tenants.items()}
    keys = {key: tenants[name] for name, section in config.tenants.items() for key in section.keys}
    policy = Policy("stable", tier_router(config))
    lanes = {name: _lane(name, section, config, clock, dice) for name, section in config.pools.items()}
    quota = MemoryQuota(clock)
    quota.configure(tenants.values())

    def policy_for(call: Call) -> Policy:
        return policy

    return Parts(config, tenants, keys, policy, lanes, quota, Pipeline(policy_for, lanes, quota, clock))


def tier_router(config: Config) -> TierRouter:
    """The router of one configuration; of a tier with several pools the first is used."""
    first: dict[str, TierPool] = {}
    for name, pool in config.pools.items():
        first.setdefault(pool.tier, TierPool(pool.tier, name, pool.model))
    tiers = [first[tier] for tier in config.tiers if tier in first]
    return TierRouter(tiers, [_route(name, config) for name in config.routes])


def _route(name: str, config: Config) -> Route:
    section = config.routes[name]
    rules = tuple(Rule(rule.name, _condition(dict(rule.when)), rule.tier) for rule in section.rules)
    return Route(
        name=name,
        default=section.default,
        rules=rules,
        classifier=CueScore() if section.classifier is not None else None,
        small=config.tiers[0],
        large=config.tiers[-1],
        spill_up=section.spill.up,
        spill_down=frozenset(section.spill.down),
    )


def _condition(when: dict[str, object]) -> Condition:
    tenants = when.pop("tenants")
    named = frozenset(str(each) for each in tenants) if isinstance(tenants, tuple) else None
    return Condition(**when, tenants=named)  # type: ignore[arg-type]  # the section has the very fields of Condition


def _lane(
    name: str, section: PoolSection, config: Config, clock: Callable[[], float], dice: Callable[[], float]
) -> Lane:
    key = ((b"authorization", b"Bearer " + section.api_key.get_secret_value().encode()),) if section.api_key else ()
    pool = Pool(
        name,
        [Endpoint(each.label, each.url, each.weight) for each in section.endpoints],
        clock=clock,
        dice=dice,
        per_endpoint_limit=section.capacity.in_flight,
        timeouts=Timeouts(section.timeouts.connect, section.timeouts.first_token, section.timeouts.gap),
        rules=HealthRules(config.health.eject_after, config.health.probation),
        attempts=max(1, config.retry.attempts),
        budget=RetryBudget(config.retry.budget),
        interval=config.health.interval,
        watch_headers=key,
    )
    limit = KneeLimit(Capacity(section.capacity.in_flight, section.capacity.waiting), pool.available)
    return Lane(
        pool=name,
        dispatcher=Dispatcher(Admission(limit, queue_rules(section, config)), clock),
        upstream=pool,
        outputs=OutputLengths(),
        window=section.window,
        headers=key,
        priority_scheduling=section.priority_scheduling,
        first_token=section.timeouts.first_token,
        keepalive=config.keepalive,
        inter_token=section.slo.inter_token * _PATIENCE_PER_TOKEN,
    )


def queue_rules(section: PoolSection, config: Config) -> QueueRules:
    """The bounds of one pool's lines."""
    online, batch = config.queue.online, config.queue.batch
    return QueueRules(
        online_timeout=online.timeout,
        online_limit=online.limit,
        batch_timeout=batch.timeout,
        batch_limit=batch.limit if batch.limit is not None else 10_000,
        floor=batch.floor,
        headroom=batch.headroom,
        first_token_slo=section.slo.first_token,
    )
