"""What a call may ask for is bounded before anything is reserved or sent."""

from __future__ import annotations

import pytest

from gateway.core.caps import apply_caps
from gateway.core.refusal import Reason, Refusal
from gateway.core.types import Call, Caps, Prompt
from tests.core.making import a_call

CAPS = Caps(default_max_tokens=256, max_tokens=512, prompt_tokens=1000, choices=4)


def bounded(call: Call, caps: Caps = CAPS) -> Call:
    result = apply_caps(call, caps)
    assert isinstance(result, Call)
    return result


def refused(call: Call, caps: Caps = CAPS) -> Refusal:
    result = apply_caps(call, caps)
    assert isinstance(result, Refusal)
    return result


@pytest.mark.parametrize(("asked", "given"), [(None, 256), (1, 1), (512, 512), (513, 512), (65535, 512)])
def test_max_tokens_is_set_and_bounded(asked: int | None, given: int) -> None:
    """LM-02, LM-03."""
    assert bounded(a_call(max_tokens=asked)).max_tokens == given


@pytest.mark.parametrize(("asked", "told"), [(None, ""), (512, ""), (513, "max_tokens=512")])
def test_only_a_cap_that_changed_the_request_is_told(asked: int | None, told: str) -> None:
    assert bounded(a_call(max_tokens=asked)).clamped == told


def test_the_default_is_bounded_too() -> None:
    assert bounded(a_call(max_tokens=None), Caps(default_max_tokens=4096, max_tokens=100)).max_tokens == 100


def test_a_call_within_its_caps_is_not_touched() -> None:
    call = a_call()
    assert apply_caps(call, CAPS) is call


def test_over_the_cap_may_be_refused_instead() -> None:
    strict = Caps(max_tokens=512, clamp=False)
    refusal = refused(a_call(max_tokens=513), strict)
    assert (refusal.reason, refusal.param) == (Reason.MAX_TOKENS_TOO_LARGE, "max_tokens")
    assert "513" in refusal.message and "512" in refusal.message
    assert bounded(a_call(max_tokens=512), strict).max_tokens == 512


@pytest.mark.parametrize(("fields", "param"), [({"messages": b"[]"}, "messages"), ({"prompt": b'""'}, "prompt")])
def test_a_prompt_too_long_is_refused_and_the_field_named(fields: dict[str, bytes], param: str) -> None:
    refusal = refused(a_call(prompt=Prompt(1001), fields=fields))
    assert (refusal.reason, refusal.param) == (Reason.PROMPT_TOO_LONG, param)
    assert refusal.retry_after is None
    assert bounded(a_call(prompt=Prompt(1000), fields=fields)).prompt.tokens == 1000


@pytest.mark.parametrize(("choices", "prompts", "param"), [(5, 1, "n"), (6, 3, "prompt")])
def test_too_many_sequences_are_refused(choices: int, prompts: int, param: str) -> None:
    """LM-05: best_of and a list of prompts count as n does."""
    refusal = refused(a_call(choices=choices, prompts=prompts))
    assert (refusal.reason, refusal.param) == (Reason.TOO_MANY_CHOICES, param)
    assert bounded(a_call(choices=4, prompts=4)).choices == 4
