"""Bounds on one call: input length, output length, number of sequences; lowered or refused."""

from __future__ import annotations

from dataclasses import replace

from gateway.core.refusal import Reason, Refusal
from gateway.core.types import Call, Caps


def apply_caps(call: Call, caps: Caps) -> Call | Refusal:
    """The call with `max_tokens` set and within `caps`, or why it cannot be served as it is.

    The two output fields of a chat call were already joined to the larger one when it was parsed, so a second
    field cannot slip past; `choices` counts every sequence (n or best_of, times the prompts of a list).
    """
    if call.prompt.tokens > caps.prompt_tokens:
        return too_long(call.prompt.tokens, caps.prompt_tokens, call)
    if call.choices > caps.choices:
        param = "n" if call.prompts == 1 else "prompt"
        return Refusal(
            Reason.TOO_MANY_CHOICES,
            f"This request would generate {call.choices} sequences (n or best_of, times the number of prompts); "
            f"at most {caps.choices} are allowed. Lower '{param}' or send several requests.",
            param=param,
        )
    if call.max_tokens is None:
        return replace(call, max_tokens=min(caps.default_max_tokens, caps.max_tokens))
    if call.max_tokens <= caps.max_tokens:
        return call
    if not caps.clamp:
        return Refusal(
            Reason.MAX_TOKENS_TOO_LARGE,
            f"max_tokens is {call.max_tokens}, at most {caps.max_tokens} are allowed. Ask for fewer output tokens.",
            param="max_tokens",
        )
    return replace(call, max_tokens=caps.max_tokens, clamped=f"max_tokens={caps.max_tokens}")


def too_long(tokens: int, bound: int, call: Call) -> Refusal:
    """The refusal of a prompt of about `tokens` tokens where `bound` are allowed."""
    param = "messages" if "messages" in call.fields else "prompt"
    return Refusal(
        Reason.PROMPT_TOO_LONG,
        f"The input is about {tokens} tokens long, at most {bound} are allowed. Shorten '{param}'.",
        param=param,
    )
