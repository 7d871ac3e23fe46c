"""What an engine's JSON says about a call: tokens used, whether it finished, whether it is an error."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from gateway.core.types import Usage

# OpenAI responses and Anthropic messages say "the whole answer is here" by the type of an event.
FINAL_TYPES = frozenset(("message_stop", "response.completed", "response.incomplete"))
TERMINAL_TYPES = FINAL_TYPES | {"response.failed"}
ERROR_TYPES = frozenset(("error", "response.failed"))
_MOST_TOKENS = 1 << 40  # nobody means more; beyond that sums and means would no longer be numbers
_DECODER = msgspec.json.Decoder()


def decoded(data: bytes) -> dict[str, Any] | None:
    """The JSON object in `data`, None if it is anything else."""
    try:
        value = _decoded(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _decoded(data: bytes) -> Any:
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # What most clients read is an answer: NaN, a lone surrogate, an integer beyond all measure.
        return json.loads(data)


def error_in(value: dict[str, Any]) -> bool:
    """Is this object an error (OpenAI, Anthropic, Responses or TGI shape)?"""
    return bool(value.get("error")) or kind_of(value) in ERROR_TYPES


def kind_of(value: dict[str, Any]) -> str:
    """The `type` of an object; "" if that is no text (an engine may send anything)."""
    kind = value.get("type")
    return kind if isinstance(kind, str) else ""


def error_status(value: dict[str, Any]) -> int:
    """The HTTP status an error object stands for: its own code where it has one, else 500."""
    error = value.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, str) and code.isascii() and code.isdigit():
        code = int(code[:3])
    if isinstance(code, int) and 400 <= code <= 599:
        return code
    kind = kind_of(error).lower() if isinstance(error, dict) else ""
    return 503 if "unavailable" in kind or "overloaded" in kind else 500


def finish_in(value: dict[str, Any]) -> bool:
    """Does this event end a choice, or the answer?"""
    if kind_of(value) in TERMINAL_TYPES:
        return True
    delta = value.get("delta")
    if isinstance(delta, dict) and delta.get("stop_reason") is not None:
        return True
    choices = value.get("choices")
    return isinstance(choices, list) and any(
        isinstance(c, dict) and c.get("finish_reason") is not None for c in choices
    )


def usage_only(value: dict[str, Any]) -> bool:
    """Is this the extra chunk that only carries usage (`choices` empty)?"""
    return value.get("choices") == [] and isinstance(value.get("usage"), dict) and not value.get("error")


def usage_in(value: dict[str, Any], before: Usage | None = None) -> Usage | None:
    """Tokens reported in `value`; what it leaves out is taken from `before`; None if it reports nothing sound."""
    for holder in (value, value.get("response"), value.get("message")):
        usage = holder.get("usage") if isinstance(holder, dict) else None
        if isinstance(usage, dict):
            return _usage(usage, before or Usage())
    return None


def _usage(usage: dict[str, Any], before: Usage) -> Usage | None:
    prompt = _count(usage, "prompt_tokens", "input_tokens")
    completion = _count(usage, "completion_tokens", "output_tokens")
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else None
    if "cache_read_input_tokens" in usage:
        # Anthropic's input_tokens leave out what was read from or written to the cache; a quota counts all of it.
        cached = _count(usage, "cache_read_input_tokens")
        if prompt is not None:
            prompt += (cached or 0) + (_count(usage, "cache_creation_input_tokens") or 0)
    if prompt is None and completion is None:
        return None
    return Usage(
        prompt=before.prompt if prompt is None else prompt,
        completion=before.completion if completion is None else completion,
        cached=before.cached if cached is None else cached,
    )


def _count(holder: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = holder.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS:
            return value
    return None
