"""What the simulated model says: deterministic words, and how many of them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from gateway.sim.waiting import Finish

# A prime number of words, none of which JSON must escape: any stride visits them all.
_TEXT = (
    "the gateway holds a queue for each tier and lets a call pass when its pool has room so that no engine"
    " is pushed past the knee where first tokens come late while batch work waits in turn under online load"
)
_WORDS = tuple(_TEXT.split())
_MEDIAN_LOG, _SIGMA = 5.01, 0.6


@dataclass(frozen=True, slots=True)
class Voice:
    """One sequence's text: token number k is `word(k)`."""

    offset: int
    stride: int

    def word(self, position: int) -> str:
        """A token's text, JSON-safe, with its leading space."""
        return " " + _WORDS[(self.offset + position * self.stride) % len(_WORDS)]

    def text(self, tokens: int) -> str:
        """The first `tokens` tokens."""
        return "".join(self.word(position) for position in range(tokens))


@dataclass(frozen=True, slots=True)
class Utterance:
    """What one sequence will say: `tokens` of output (the last is silent when it ends by "stop") and why it ends."""

    voice: Voice
    tokens: int
    finish: Finish


def utterance(seed: str, limit: int, to_the_limit: bool) -> Utterance:
    """The same for the same arguments; length lognormal (median 150 tokens, sigma 0.6), at most `limit`."""
    dice = random.Random(seed)
    voice = Voice(dice.randrange(len(_WORDS)), dice.randrange(1, len(_WORDS)))
    wished = max(1, round(dice.lognormvariate(_MEDIAN_LOG, _SIGMA)))
    if to_the_limit or wished > limit:
        return Utterance(voice, limit, Finish.LENGTH)
    return Utterance(voice, wished, Finish.STOP)
