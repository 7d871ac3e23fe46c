"""Which tier answers, and why: the reasons are a contract, they are told in a header and counted."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from gateway.core.refusal import Reason, Refusal
from gateway.core.tiering import Condition, PoolFacts, Route, Rule, TierChoice, TierPool, TierRouter
from gateway.core.types import Band, Call, Prompt, Tenant
from tests.core.making import a_call

TIERS = (
    TierPool("small", "pool-7b", "Qwen2.5-7B-Instruct"),
    TierPool("large", "pool-70b", "Qwen2.5-72B-Instruct"),
)
SMALL_ONLY = Tenant("intern", tiers=frozenset({"small"}))
LARGE_ONLY = Tenant("lab", tiers=frozenset({"large"}))


@dataclass(frozen=True)
class Scored:
    """A classifier that always says the same."""

    value: float

    def score(self, prompt: Prompt) -> float:
        """Say it."""
        return self.value


@dataclass(frozen=True)
class Above:
    """A bound from below."""

    least: int

    def holds(self, value: int) -> bool:
        """Whether `value` is larger."""
        return value > self.least


def router(**given: object) -> TierRouter:
    members: dict[str, object] = {"name": "auto", "default": "small", "small": "small", "large": "large"}
    return TierRouter(TIERS, [Route(**(members | given))])  # type: ignore[arg-type]


def facts(
    small: float = 0.0, large: float = 0.0, *, small_window: int | None = 8192, large_window: int | None = 32768
) -> dict[str, PoolFacts]:
    return {"pool-7b": PoolFacts(small_window, small), "pool-70b": PoolFacts(large_window, large)}


def chosen(by: TierRouter, call: Call, pools: dict[str, PoolFacts] | None = None) -> TierChoice:
    result = by.route(call, facts() if pools is None else pools)
    assert isinstance(result, TierChoice)
    return result


def refused(by: TierRouter, call: Call, pools: dict[str, PoolFacts] | None = None) -> Refusal:
    result = by.route(call, facts() if pools is None else pools)
    assert isinstance(result, Refusal)
    return result


def told(by: TierRouter, call: Call, pools: dict[str, PoolFacts] | None = None) -> tuple[str, str]:
    choice = chosen(by, call, pools)
    return choice.tier, choice.why


# who decides


@pytest.mark.parametrize("model", ["large", "pool-70b", "Qwen2.5-72B-Instruct"])
def test_a_tier_a_pool_or_a_model_by_name_is_pinned(model: str) -> None:
    choice = chosen(router(classifier=Scored(0.1)), a_call(model=model))
    assert choice == TierChoice("large", "pool-70b", "Qwen2.5-72B-Instruct", "pinned", model, choice.call)


def test_an_unknown_model_is_told_what_there_is() -> None:
    refusal = refused(router(), a_call(model="gpt-4", tenant=SMALL_ONLY))
    assert (refusal.reason, refusal.param) == (Reason.UNKNOWN_MODEL, "model")
    assert "auto, small" in refusal.message and "large" not in refusal.message


def test_the_first_rule_that_holds_decides_before_the_classifier() -> None:
    by = router(
        classifier=Scored(0.1),
        rules=(
            Rule("images", Condition(images=True), "large"),
            Rule("long", Condition(prompt_tokens=Above(6000)), "large"),
        ),
    )
    assert told(by, a_call(prompt=Prompt(7000, "hi", images=1))) == ("large", "rule:images")
    assert told(by, a_call(prompt=Prompt(7000, "hi"))) == ("large", "rule:long")
    assert told(by, a_call(prompt=Prompt(6000, "hi"))) == ("small", "classifier:0.10")


@pytest.mark.parametrize(
    ("when", "call"),
    [
        (Condition(images=True), a_call(prompt=Prompt(10, images=2))),
        (Condition(tools=True), a_call(prompt=Prompt(10, tools=1))),
        (Condition(stream=True), a_call(stream=True)),
        (Condition(prompt_tokens=Above(200)), a_call(prompt=Prompt(201))),
        (Condition(max_tokens=Above(50)), a_call(max_tokens=51)),
        (Condition(turns=Above(3)), a_call(prompt=Prompt(10, turns=4))),
        (Condition(band=Band.BATCH), a_call(band=Band.BATCH)),
        (Condition(tenants=frozenset({"vip"})), a_call(tenant=Tenant("vip"))),
    ],
)
def test_every_condition_holds_when_met_and_only_then(when: Condition, call: Call) -> None:
    assert when.holds(call)
    assert not when.holds(a_call())
    assert not replace(when, band=Band.ONLINE, stream=True, turns=Above(100)).holds(call)


def test_a_condition_without_demands_always_holds() -> None:
    assert Condition().holds(a_call())
    assert Condition(images=False).holds(a_call())


@pytest.mark.parametrize(
    ("score", "tier", "why"),
    [(0.0, "small", "0.00"), (0.49, "small", "0.49"), (0.5, "large", "0.50"), (1.0, "large", "1.00")],
)
def test_the_classifier_decides_at_one_half(score: float, tier: str, why: str) -> None:
    assert told(router(classifier=Scored(score)), a_call()) == (tier, f"classifier:{why}")


@pytest.mark.parametrize("text", ["", "  \n"])
def test_nothing_to_classify_takes_the_default(text: str) -> None:
    """RT-11."""
    assert told(router(classifier=Scored(0.9)), a_call(prompt=Prompt(1, text))) == ("small", "default")
    assert told(router(default="large"), a_call()) == ("large", "default")


# who may use it


def test_a_forbidden_tier_asked_by_name_is_refused() -> None:
    refusal = refused(router(), a_call(model="large", tenant=SMALL_ONLY))
    assert (refusal.reason, refusal.param) == (Reason.TIER_FORBIDDEN, "model")
    assert "small" in refusal.message


@pytest.mark.parametrize(("tenant", "score", "tier"), [(SMALL_ONLY, 0.9, "small"), (LARGE_ONLY, 0.1, "large")])
def test_the_route_stays_within_what_a_tenant_may_use(tenant: Tenant, score: float, tier: str) -> None:
    assert told(router(classifier=Scored(score)), a_call(tenant=tenant)) == (tier, "tenant")


def test_a_tenant_without_tiers_is_refused_on_every_route() -> None:
    nobody = Tenant("nobody", tiers=frozenset())
    assert refused(router(), a_call(tenant=nobody)).reason is Reason.TIER_FORBIDDEN
    assert refused(router(), a_call(tenant=nobody, model="small")).reason is Reason.TIER_FORBIDDEN
    assert router().models(nobody) == ()


def test_the_models_of_a_tenant_are_routes_and_its_tiers() -> None:
    assert router().models(Tenant("all")) == ("auto", "small", "large")
    assert router().models(SMALL_ONLY) == ("auto", "small")


# whether it fits


def test_what_does_not_fit_the_small_window_goes_up() -> None:
    """RT-10: prompt (tools and history too) and all output count."""
    by = router(classifier=Scored(0.1))
    assert told(by, a_call(prompt=Prompt(7000, "hi"), max_tokens=1192)) == ("small", "classifier:0.10")
    assert told(by, a_call(prompt=Prompt(7000, "hi"), max_tokens=1193)) == ("large", "window")


def test_a_tenant_that_may_not_go_up_gets_a_shorter_answer() -> None:
    """LM-03."""
    choice = chosen(router(), a_call(prompt=Prompt(200), max_tokens=32000, tenant=SMALL_ONLY))
    room = 8192 - 200 - 16
    assert (choice.tier, choice.why) == ("small", "default")
    assert (choice.call.max_tokens, choice.call.clamped) == (room, f"max_tokens={room}")


def test_fitting_nowhere_whole_it_is_clamped_where_it_was_to_go() -> None:
    choice = chosen(router(), a_call(prompt=Prompt(200), max_tokens=65535))
    assert (choice.tier, choice.why, choice.call.max_tokens) == ("small", "default", 8192 - 216)


def test_a_prompt_that_fills_the_small_window_goes_up_and_is_clamped_there() -> None:
    choice = chosen(router(), a_call(prompt=Prompt(8190), max_tokens=65535))
    assert (choice.tier, choice.why, choice.call.max_tokens) == ("large", "window", 32768 - 8190 - 16)


@pytest.mark.parametrize(("fields", "param"), [({"messages": b"[]"}, "messages"), ({"prompt": b'""'}, "prompt")])
def test_a_prompt_that_fits_nowhere_is_refused(fields: dict[str, bytes], param: str) -> None:
    refusal = refused(router(), a_call(prompt=Prompt(32768), max_tokens=1, fields=fields))
    assert (refusal.reason, refusal.param) == (Reason.CONTEXT_LENGTH_EXCEEDED, param)
    assert "32768" in refusal.message


@pytest.mark.parametrize(("tokens", "room"), [(8175, 1), (8176, None), (8192, None), (9000, None)])
def test_max_tokens_never_becomes_zero_or_less(tokens: int, room: int | None) -> None:
    result = router().route(a_call(model="small", prompt=Prompt(tokens), max_tokens=100), facts())
    if room is None:
        assert isinstance(result, Refusal)
        assert result.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    else:
        assert isinstance(result, TierChoice)
        assert result.call.max_tokens == room


def test_a_pinned_tier_is_never_changed_for_the_window() -> None:
    choice = chosen(router(), a_call(model="small", prompt=Prompt(8000), max_tokens=1000))
    assert (choice.tier, choice.why, choice.call.max_tokens) == ("small", "pinned", 8192 - 8000 - 16)


@pytest.mark.parametrize("pools", [{}, facts(small_window=None)])
def test_an_unknown_window_bounds_nothing(pools: dict[str, PoolFacts]) -> None:
    choice = chosen(router(), a_call(prompt=Prompt(100_000), max_tokens=5000), pools)
    assert (choice.tier, choice.call.max_tokens) == ("small", 5000)


# where there is room


@pytest.mark.parametrize(
    ("small", "large", "expected"),
    [
        (1.0, 0.49, ("large", "spill")),
        (2.0, 0.0, ("large", "spill")),
        (0.99, 0.0, ("small", "default")),
        (1.0, 0.5, ("small", "default")),
    ],
)
def test_a_full_small_pool_spills_up_into_an_idle_one(small: float, large: float, expected: tuple[str, str]) -> None:
    assert told(router(spill_up=True), a_call(), facts(small, large)) == expected
    assert told(router(), a_call(), facts(small, large)) == ("small", "default")


def test_only_tenants_that_allow_it_spill_down() -> None:
    by = router(default="large", spill_down=frozenset({"demo"}))
    assert told(by, a_call(tenant=Tenant("demo")), facts(0.0, 1.0)) == ("small", "spill")
    assert told(by, a_call(), facts(0.0, 1.0)) == ("large", "default")


def test_what_a_rule_sent_up_is_not_spilled_down() -> None:
    rules = (Rule("images", Condition(images=True), "large"),)
    by = router(rules=rules, spill_down=frozenset({"demo"}))
    seen = a_call(tenant=Tenant("demo"), prompt=Prompt(10, images=1))
    assert told(by, seen, facts(0.0, 1.0)) == ("large", "rule:images")


def test_nothing_spills_into_a_tier_the_tenant_may_not_use() -> None:
    assert told(router(spill_up=True), a_call(tenant=SMALL_ONLY), facts(1.0, 0.0)) == ("small", "default")


def test_the_last_tier_has_nowhere_to_spill_up() -> None:
    assert told(router(default="large", spill_up=True), a_call(), facts(0.0, 2.0)) == ("large", "default")


def test_what_spilled_down_must_still_fit() -> None:
    by = router(default="large", spill_down=frozenset({"demo"}))
    call = a_call(tenant=Tenant("demo"), prompt=Prompt(9000))
    assert told(by, call, facts(0.0, 1.0)) == ("large", "window")


def test_a_pinned_call_never_spills() -> None:
    assert told(router(spill_up=True), a_call(model="small"), facts(1.0, 0.0)) == ("small", "pinned")
