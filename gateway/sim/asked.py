"""Reads generation requests the way vLLM does: defaults, clamping, and its validation errors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import ceil
from typing import Any

from gateway.sim.http import HttpRequest
from gateway.sim.profile import Profile

_MOST_CHOICES = 16384
_LARGEST = 2**63 - 1
_COMPLETION_DEFAULT = 16
_MESSAGE_TOKENS, _BOS_TOKENS, _PART_TOKENS = 4, 1, 256
# vLLM refuses by characters before it tokenizes; this is the ratio its answers show.
_MOST_CHARS_PER_TOKEN = 37


class Invalid(Exception):
    """A request vLLM would refuse: status, message, error type and the field's name."""

    def __init__(self, message: str, param: str | None = None, kind: str = "BadRequestError", status: int = 400):
        super().__init__(message)
        self.message = message
        self.param = param
        self.kind = kind
        self.status = status


class Unreadable(Exception):
    """A body that is no text; FastAPI answers this one, in its own shape."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A valid generation request. `prompts` are prompt sizes and `limits` output bounds, in tokens, one a prompt.

    A limit is 0 where the prompt fills the window.
    """

    chat: bool
    prompts: tuple[int, ...]
    limits: tuple[int, ...]
    choices: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    ignore_eos: bool = False
    priority: int = 0
    seed: int | None = None
    id: str | None = None

    @property
    def sequences(self) -> int:
        """How many sequences the engine will generate."""
        return len(self.prompts) * self.choices


def read_object(request: HttpRequest) -> dict[str, Any]:
    """The body as a JSON object. Raises Invalid or Unreadable."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Invalid("1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", None, _BAD)
    if not request.body:
        raise _invalid("missing", "", "Field required", "None")
    try:
        body = json.loads(request.body.decode("utf-8"))
    except json.JSONDecodeError as error:
        context = f", 'ctx': {{'error': '{error.msg}'}}"
        raise _invalid("json_invalid", str(error.pos), "JSON decode error", "<dict of 0 items>", context) from error
    except (ValueError, RecursionError) as error:  # no UTF-8, a number too long, nesting too deep
        raise Unreadable from error
    if not isinstance(body, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise _invalid("model_attributes_type", "", message, _shown(body))
    return body


def read_generation(request: HttpRequest, chat: bool, model: str, profile: Profile) -> Asked:
    """The request, checked and completed for one model. Raises Invalid or Unreadable."""
    body = read_object(request)
    if chat:
        _list(body, "messages")
    choices, limit = _integer(body, "n"), _integer(body, "max_tokens")
    if chat and (newer := _integer(body, "max_completion_tokens")) is not None:
        limit = newer
    priority, stream, options = _integer(body, "priority") or 0, _boolean(body, "stream"), _options(body)
    check_model(body, model)
    if options is not None and not stream:
        field = "stream_options"
        raise Invalid(f"Stream options can only be defined when `stream=True`. (parameter={field})", field)
    choices = 1 if choices is None else choices
    _check_choices(choices, body)
    _check_limit(limit, profile.max_model_len)
    prompts = chat_prompt(body, profile) if chat else completion_prompts(body, profile)
    wished = limit if limit is not None or chat else _COMPLETION_DEFAULT
    room = [profile.max_model_len - tokens for tokens in prompts]
    return Asked(
        chat=chat,
        prompts=prompts,
        limits=tuple(left if wished is None else min(wished, left) for left in room),
        choices=choices,
        stream=stream,
        include_usage=_boolean(options or {}, "include_usage"),
        continuous_usage=_boolean(options or {}, "continuous_usage_stats"),
        ignore_eos=_boolean(body, "ignore_eos"),
        priority=_priority(request, priority),
        seed=_integer(body, "seed"),
        id=request.headers.get("x-request-id") or (str(body["request_id"]) if body.get("request_id") else None),
    )


def check_model(body: dict[str, Any], model: str) -> None:
    """Raises Invalid (404) for another model's name; none at all means this one."""
    asked = body.get("model")
    if asked not in (None, "", model):
        message = f"The model `{asked}` does not exist. Valid aliases: {model}."
        raise Invalid(message, "model", "NotFoundError", 404)


def chat_prompt(body: dict[str, Any], profile: Profile) -> tuple[int, ...]:
    """Size in tokens (an estimate by characters) of a conversation. Raises Invalid."""
    messages = _list(body, "messages")
    if not messages:
        raise Invalid("Cannot apply chat template to an empty conversation. Provide at least one message.")
    characters = len(json.dumps(body["tools"])) if body.get("tools") else 0
    extra = _BOS_TOKENS + _MESSAGE_TOKENS * len(messages)
    for position, message in enumerate(messages):
        if not isinstance(message, dict):
            field = f"messages.{position}"
            raise _invalid("dict_type", field, "Input should be a valid dictionary", _shown(message))
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                characters += len(text)
            elif part is not None:
                extra += _PART_TOKENS
    return (_window(extra + ceil(characters / profile.chars_per_token), characters, profile),)


def completion_prompts(body: dict[str, Any], profile: Profile) -> tuple[int, ...]:
    """Sizes in tokens of one or several prompts, given as text or token ids. Raises Invalid."""
    prompt = body.get("prompt")
    if prompt == []:
        raise Invalid("You must pass at least one prompt")
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    sizes: list[int] = []
    for each in prompts:
        if not each or not isinstance(each, str | list):
            raise Invalid("Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", "prompt")
        text = isinstance(each, str)
        tokens = ceil(len(each) / profile.chars_per_token) if text else len(each)
        sizes.append(_window(tokens, len(each) if text else 0, profile))
    return tuple(sizes)


def _window(tokens: int, characters: int, profile: Profile) -> int:
    limit = profile.max_model_len
    most = limit * _MOST_CHARS_PER_TOKEN
    if characters > most:
        raise Invalid(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {characters} "
            f"characters (more than {most} characters, which is the upper bound for {limit} input tokens). "
            f"Please reduce the length of the input prompt. (parameter=input_text, value={characters})",
            "input_text",
        )
    if tokens > limit:
        raise Invalid(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains at least {limit + 1}"
            " input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the"
            f" input prompt. (parameter=input_tokens, value={limit + 1})",
            "input_tokens",
        )
    return tokens


def _check_choices(choices: int, body: dict[str, Any]) -> None:
    if choices < 1:
        raise Invalid(f"n must be at least 1, got {choices}.")
    if choices > _MOST_CHOICES:
        advice = "To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable."
        raise Invalid(f"n must be at most {_MOST_CHOICES}, got {choices}. {advice}")
    if choices > 1 and body.get("temperature") == 0:
        raise Invalid(f"n must be 1 when using greedy sampling, got {choices}.")


def _check_limit(limit: int | None, window: int) -> None:
    if limit is not None and limit < 1:
        message = f"max_tokens must be at least 1, got {limit}. (parameter=max_tokens, value={limit})"
        raise Invalid(message, "max_tokens")
    if limit is not None and limit > window:
        advice = f"Please request fewer output tokens. (parameter=max_tokens, value={limit})"
        raise Invalid(f"max_tokens={limit} cannot be greater than max_model_len={window}. {advice}", "max_tokens")


def _priority(request: HttpRequest, asked: int) -> int:
    # The header wins over the body, and vLLM ignores one that is no number.
    try:
        return int(request.headers["x-vllm-priority"])
    except (KeyError, ValueError):
        return asked


_BAD = "Bad Request"


def _invalid(kind: str, field: str, message: str, shown: str, context: str = "") -> Invalid:
    where = f"body.{field}" if field else "body"
    detail = f"{{'type': '{kind}', 'loc': '{where}', 'msg': '{message}', 'input': '{shown}'{context}}}"
    return Invalid(f"1 validation error:\n  {detail}", where, _BAD)


def _shown(value: object) -> str:
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)


def _list(body: dict[str, Any], field: str) -> list[Any]:
    if field not in body:
        raise _invalid("missing", field, "Field required", _shown(body))
    value = body[field]
    if not isinstance(value, list):
        raise _invalid("list_type", field, "Input should be a valid list", _shown(value))
    return value


def _integer(body: dict[str, Any], field: str) -> int | None:
    value = body.get(field)
    if value is None:
        return None
    if isinstance(value, float) and not value.is_integer():
        message = "Input should be a valid integer, got a number with a fractional part"
        raise _invalid("int_from_float", field, message, _shown(value))
    try:
        number = int(value)
    except (TypeError, ValueError) as error:
        message = "Input should be a valid integer, unable to parse string as an integer"
        raise _invalid("int_parsing", field, message, _shown(value)) from error
    if abs(number) > _LARGEST:
        message = f"Input should be less than or equal to {_LARGEST}"
        raise _invalid("less_than_equal", field, message, _shown(value), f", 'ctx': {{'le': {_LARGEST}}}")
    return number


def _boolean(body: dict[str, Any], field: str) -> bool:
    value = body.get(field)
    if value is None or isinstance(value, bool):
        return bool(value)
    if value in ("true", "True", "1", 1):
        return True
    if value in ("false", "False", "0", 0):
        return False
    message = "Input should be a valid boolean, unable to interpret input"
    raise _invalid("bool_parsing", field, message, _shown(value))


def _options(body: dict[str, Any]) -> dict[str, Any] | None:
    value = body.get("stream_options")
    if value is not None and not isinstance(value, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise _invalid("model_attributes_type", "stream_options", message, _shown(value))
    return value
