"""Which tier answers a call, and why: pinned model, rules, classifier, default, in that order; then fit and spill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gateway.core.classifier import THRESHOLD, Classifier
from gateway.core.refusal import Reason, Refusal
from gateway.core.types import Band, Call, Tenant

WINDOW_MARGIN = 16
_SPILL_IDLE = 0.5


class Bound(Protocol):
    """A bound on a whole number, such as "> 6000"."""

    def holds(self, value: int) -> bool:
        """Whether `value` is on the asked side."""


@dataclass(frozen=True, slots=True)
class Condition:
    """When a rule applies: everything that is set must hold; tokens and turns by their bounds."""

    images: bool | None = None
    tools: bool | None = None
    stream: bool | None = None
    prompt_tokens: Bound | None = None
    max_tokens: Bound | None = None
    turns: Bound | None = None
    band: Band | None = None
    tenants: frozenset[str] | None = None

    def holds(self, call: Call) -> bool:
        """Whether `call` meets all of it."""
        prompt = call.prompt
        wanted = (
            (self.images, prompt.images > 0),
            (self.tools, prompt.tools > 0),
            (self.stream, call.stream),
            (self.band, call.band),
        )
        bounds = (
            (self.prompt_tokens, prompt.tokens),
            (self.max_tokens, call.max_tokens or 0),
            (self.turns, prompt.turns),
        )
        return (
            all(want is None or want == is_ for want, is_ in wanted)
            and all(bound is None or bound.holds(value) for bound, value in bounds)
            and (self.tenants is None or call.tenant.name in self.tenants)
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """If `when` holds, the call goes to `tier`; the first rule that holds decides."""

    name: str
    when: Condition
    tier: str


@dataclass(frozen=True, slots=True)
class Route:
    """A model name that the gateway resolves itself (`auto`)."""

    name: str
    default: str
    rules: tuple[Rule, ...] = ()
    classifier: Classifier | None = None
    small: str = ""
    large: str = ""
    spill_up: bool = False
    spill_down: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What routing needs to know of a pool now: context window in tokens (None: unknown), fullness (1.0 = full)."""

    window: int | None = None
    saturation: float = 0.0


@dataclass(frozen=True, slots=True)
class TierPool:
    """The pool of one tier and the model name its engines know."""

    tier: str
    pool: str
    model: str


@dataclass(frozen=True, slots=True)
class TierChoice:
    """Where the call goes and why; `call` may carry fewer max_tokens, so that it fits the window."""

    tier: str
    pool: str
    model: str
    why: str
    route: str
    call: Call


class TierRouter:
    """Routes of one policy; `tiers` run from the cheapest to the most capable."""

    def __init__(self, tiers: Sequence[TierPool], routes: Sequence[Route]) -> None:
        self._tiers = {each.tier: each for each in tiers}
        self._routes = {each.name: each for each in routes}
        self._pinned = {each.model: each.tier for each in tiers}
        self._pinned.update({each.pool: each.tier for each in tiers})
        self._pinned.update({each.tier: each.tier for each in tiers})

    def models(self, tenant: Tenant) -> tuple[str, ...]:
        """Model names that `tenant` may ask for: routes first, then tiers."""
        tiers = [tier for tier in self._tiers if _allowed(tenant, tier)]
        return (*self._routes, *tiers) if tiers else ()

    def route(self, call: Call, pools: Mapping[str, PoolFacts]) -> TierChoice | Refusal:
        """The tier of `call`; `pools` maps pool names to what is known of them now."""
        route = self._routes.get(call.model)
        if route is None:
            return self._route_pinned(call, pools)
        tier, why = _decide(route, call)
        if not _allowed(call.tenant, tier):
            tier, why = next((each for each in self._tiers if _allowed(call.tenant, each)), ""), "tenant"
            if not tier:
                return _forbidden(call, call.model)
        if route.spill_up or call.tenant.name in route.spill_down:
            tier, why = self._spill(route, call, tier, why, pools)
        return self._fitted(call, tier, why, route.name, pools)

    def _route_pinned(self, call: Call, pools: Mapping[str, PoolFacts]) -> TierChoice | Refusal:
        tier = self._pinned.get(call.model)
        if tier is None:
            names = ", ".join(self.models(call.tenant))
            return Refusal(Reason.UNKNOWN_MODEL, f"There is no such model here. Use one of: {names}.", param="model")
        if not _allowed(call.tenant, tier):
            return _forbidden(call, tier)
        return self._choice(call, tier, "pinned", call.model, pools)

    def _fitted(
        self, call: Call, tier: str, why: str, route: str, pools: Mapping[str, PoolFacts]
    ) -> TierChoice | Refusal:
        """The chosen tier, or the next larger one whose window holds the prompt and all its output."""
        order = list(self._tiers)
        for larger in order[order.index(tier) :]:
            if _allowed(call.tenant, larger) and _fits(call, pools.get(self._tiers[larger].pool)):
                return self._choice(call, larger, why if larger == tier else "window", route, pools)
        for larger in order[order.index(tier) :]:
            if _allowed(call.tenant, larger):
                choice = self._choice(call, larger, why if larger == tier else "window", route, pools)
                if isinstance(choice, TierChoice):
                    return choice
        return self._choice(call, tier, why, route, pools)

    def _choice(
        self, call: Call, tier: str, why: str, route: str, pools: Mapping[str, PoolFacts]
    ) -> TierChoice | Refusal:
        target = self._tiers[tier]
        bounded = _within_window(call, pools.get(target.pool))
        if isinstance(bounded, Refusal):
            return bounded
        return TierChoice(tier, target.pool, target.model, why, route, bounded)

    def _spill(self, route: Route, call: Call, tier: str, why: str, pools: Mapping[str, PoolFacts]) -> tuple[str, str]:
        """The neighbouring tier, when this one is full, that one is idle, and the route and the tenant allow it."""
        order = list(self._tiers)
        at = order.index(tier)
        full = _saturation(pools, self._tiers[tier].pool) >= 1.0
        # A rule says what a call needs (images, say): more may do for it, less may not.
        may_go_down = call.tenant.name in route.spill_down and not why.startswith("rule:")
        for step, permitted in ((1, route.spill_up), (-1, may_go_down)):
            if full and permitted and 0 <= at + step < len(order):
                other = order[at + step]
                if _allowed(call.tenant, other) and _saturation(pools, self._tiers[other].pool) < _SPILL_IDLE:
                    return other, "spill"
        return tier, why


def _decide(route: Route, call: Call) -> tuple[str, str]:
    for rule in route.rules:
        if rule.when.holds(call):
            return rule.tier, f"rule:{rule.name}"
    if route.classifier is None or not call.prompt.text.strip():
        return route.default, "default"
    score = route.classifier.score(call.prompt)
    return (route.large if score >= THRESHOLD else route.small), f"classifier:{score:.2f}"


def _allowed(tenant: Tenant, tier: str) -> bool:
    return tenant.tiers is None or tier in tenant.tiers


def _forbidden(call: Call, tier: str) -> Refusal:
    allowed = ", ".join(sorted(call.tenant.tiers or ())) or "none"
    return Refusal(Reason.TIER_FORBIDDEN, f"This key may not use tier '{tier}'; it may use: {allowed}.", param="model")


def _fits(call: Call, facts: PoolFacts | None) -> bool:
    window = facts.window if facts else None
    return window is None or call.prompt.tokens + (call.max_tokens or 0) <= window


def _within_window(call: Call, facts: PoolFacts | None) -> Call | Refusal:
    """The call with max_tokens lowered to what the window leaves; refused if the prompt alone does not fit."""
    if _fits(call, facts):
        return call
    window = (facts.window if facts else None) or 0
    room = window - call.prompt.tokens - WINDOW_MARGIN
    if room < 1:
        param = "messages" if "messages" in call.fields else "prompt"
        return Refusal(
            Reason.CONTEXT_LENGTH_EXCEEDED,
            f"The input is about {call.prompt.tokens} tokens long; the context window of this model is {window} tokens "
            f"and must hold the output too. Shorten '{param}'.",
            param=param,
        )
    return replace(call, max_tokens=room, clamped=f"max_tokens={room}")


def _saturation(pools: Mapping[str, PoolFacts], pool: str) -> float:
    facts = pools.get(pool)
    return facts.saturation if facts else 0.0
