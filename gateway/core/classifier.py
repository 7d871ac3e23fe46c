"""Score of a prompt between 0 (the small model will do) and 1 (it takes the large one)."""

from __future__ import annotations

import math
from typing import Protocol

from gateway.core.features import extract
from gateway.core.types import Prompt

THRESHOLD = 0.5
_ENOUGH = 5


class Classifier(Protocol):
    """Anything that scores a prompt; 0.5 is the line between the tiers."""

    def score(self, prompt: Prompt) -> float:
        """Between 0 (small) and 1 (large)."""


class CueScore:
    """A hand-set linear score over cues, in force until a trained model replaces it.

    Asking words alone do not reach the line ("step by step, please"): what is asked about must be demanding too, or
    there must be enough of it.
    """

    def score(self, prompt: Prompt) -> float:
        """Between 0 (small) and 1 (large)."""
        seen = extract(prompt)
        logit = -1.8 + 0.25 * min(seen.acts, 3) + 0.5 * min(seen.subjects, 3)
        if seen.acts and seen.subjects:
            logit += 1.4
        elif seen.hard and seen.substance >= _ENOUGH:
            logit += 1.9
        if seen.code:
            logit += 1.0
        if seen.math:
            logit += 1.2
        if seen.light:
            logit -= 1.5
        logit += 0.4 * math.log2(max(1.0, seen.tokens / 100))
        return 1.0 / (1.0 + math.exp(-logit))
