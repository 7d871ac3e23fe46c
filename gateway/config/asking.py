"""The asking half of the configuration: routes, caps, queues, tenants, releases."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Self

from pydantic import model_validator

from gateway.config.fields import (
    BandField,
    Bytes,
    ComparisonField,
    Count,
    Flag,
    Fraction,
    FreezeField,
    KeyHash,
    Name,
    PositiveCount,
    QueueLimit,
    RateField,
    Seconds,
    Stage,
    Text,
    Weight,
    one_of,
    rows,
)
from gateway.config.serving import OnError, Section
from gateway.core.types import Band, Caps, Limits
from gateway.core.types import Tenant as CoreTenant


class When(Section):
    """What a rule asks of a call; everything written must hold."""

    images: Flag | None = None
    tools: Flag | None = None
    stream: Flag | None = None
    prompt_tokens: ComparisonField | None = None
    max_tokens: ComparisonField | None = None
    turns: ComparisonField | None = None
    band: BandField | None = None
    tenants: Annotated[tuple[Name, ...], rows(least=1)] | None = None

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("asks for nothing, so the rule would take every call; use the route's default instead")
        return self


class Rule(Section):
    """Calls that fit `when` go to `tier`; the first rule that fits wins."""

    name: Name
    when: When
    tier: Name


class Classifier(Section):
    """The trained model that picks a tier; `share_large` is the share of calls meant for the large tier.

    `abstain` is the tier of calls it cannot judge; not written, it is the last of `tiers`, filled in by loading.
    """

    model: Text = "default"
    share_large: Fraction = 0.3
    abstain: Name | None = None


class Spill(Section):
    """Whether a full small tier may use an idle large one, and which tenants may be moved down."""

    up: Flag = True
    down: Annotated[tuple[Name, ...], rows()] = ()


class Route(Section):
    """How a model name that stands for several tiers is resolved."""

    rules: Annotated[tuple[Rule, ...], rows()] = ()
    classifier: Classifier | None = None
    default: Name
    spill: Spill = Spill()


class MaxTokens(Section):
    """Completion tokens a sequence: when the caller names none, the most, and what happens over it."""

    default: PositiveCount = 512
    limit: PositiveCount = 4096
    over: Annotated[str, one_of("clamp", "refuse")] = "clamp"

    @model_validator(mode="after")
    def _default_fits(self) -> Self:
        if {"default", "limit"} <= self.model_fields_set and self.default > self.limit:
            raise ValueError(f"default {self.default} is over limit {self.limit}")
        return self


class CapsSection(Section):
    """Bounds on one call; `body` in bytes. After loading, a tenant's caps hold the effective values."""

    max_tokens: MaxTokens = MaxTokens()
    prompt_tokens: PositiveCount = 16384
    n: PositiveCount = 4
    body: Bytes = 8 << 20


class OnlineQueue(Section):
    """Longest wait in seconds; `limit` is the most waiting calls, None (auto) follows the knee, 0 is none."""

    timeout: Seconds = 2.0
    limit: QueueLimit = None


class BatchQueue(Section):
    """As the online queue; `floor` is batch's sure share, `headroom` the share of the limit kept from batch."""

    timeout: Seconds = 3600.0
    limit: QueueLimit = 10_000
    floor: Fraction = 0.02
    headroom: Fraction = 0.25


class Queue(Section):
    """The two queueing classes."""

    online: OnlineQueue = OnlineQueue()
    batch: BatchQueue = BatchQueue()


class LimitsSection(Section):
    """What one tenant may use; None is no limit, 0 is nothing."""

    requests: RateField | None = None
    tokens: RateField | None = None
    concurrent: Count | None = None
    budget: RateField | None = None


class Tenant(Section):
    """One customer.

    After loading, `tiers` (all, when not written), `caps` and `on_error` hold the effective values.
    """

    keys: Annotated[tuple[KeyHash, ...], rows(least=1)]
    band: BandField = Band.ONLINE
    weight: Weight = 1.0
    tiers: Annotated[tuple[Name, ...], rows()] | None = None
    limits: LimitsSection = LimitsSection()
    caps: CapsSection = CapsSection()
    on_error: OnError | None = None

    def as_tenant(self, name: str) -> CoreTenant:
        """The same customer in the words of the core; call it on a loaded configuration."""
        longest = self.caps.max_tokens
        return CoreTenant(
            name=name,
            band=self.band,
            weight=self.weight,
            tiers=None if self.tiers is None else frozenset(self.tiers),
            limits=Limits(self.limits.requests, self.limits.tokens, self.limits.concurrent, self.limits.budget),
            caps=Caps(longest.default, longest.limit, longest.over == "clamp", self.caps.prompt_tokens, self.caps.n),
        )


class Canary(Section):
    """A release to some keys first: share now (0 is none, 1 is all), percent stages, hours without changes."""

    share: Fraction = 0.05
    stages: Annotated[tuple[Stage, ...], rows(least=1)] = (5, 10, 50, 100)
    freeze: Annotated[tuple[FreezeField, ...], rows()] = ()

    @model_validator(mode="after")
    def _stages_rise(self) -> Self:
        if any(after <= before for before, after in pairwise(self.stages)):
            raise ValueError("stages must rise, such as [5, 10, 50, 100]")
        return self


class Admin(Section):
    """Hashes of the keys that open the ops port."""

    keys: Annotated[tuple[KeyHash, ...], rows()] = ()
