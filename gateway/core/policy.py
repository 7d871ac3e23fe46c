"""One release's parameters in force, as one immutable snapshot: what a call is judged by from start to end."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.tiering import TierRouter


@dataclass(frozen=True, slots=True)
class Policy:
    """`release` is `stable` or `canary`; caps travel with the tenant."""

    release: str
    tiers: TierRouter
