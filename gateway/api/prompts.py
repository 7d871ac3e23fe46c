"""What is in a prompt: the turn that decides the tier, images, tools, and a token estimate of all the engine reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.core.refusal import Reason, Refusal, Refused
from gateway.core.tokens import IMAGE_TOKENS, MESSAGE_TOKENS, TAIL_TOKENS, estimate
from gateway.core.types import Prompt

_HEAD, _END = 1200, 800
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
_IMAGE_PARTS = frozenset({"image_url", "input_image", "image", "image_pil", "image_embeds"})
_MEDIA_PARTS = frozenset({"input_audio", "audio_url", "audio", "video_url", "video", "file", "input_file"})
# Members beside the messages that the engine's chat template may put in front of the model.
_READ_TOO = ("tools", "functions", "documents", "chat_template", "chat_template_kwargs", "suffix")


def malformed(message: str, param: str | None = None) -> Refused:
    """A request that is not what the API takes: 400 naming the field and the fix."""
    return Refused(Refusal(Reason.MALFORMED, message, param=param))


def decoded(text: bytes, param: str) -> Any:
    """One member of the body as a Python value; a lone surrogate (legal JSON text) is taken the slow way."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise malformed(f"'{param}' is not valid JSON.", param) from None
    except RecursionError:
        raise malformed(f"'{param}' is nested too deeply.", param) from None


@dataclass(slots=True)
class _Reading:
    """What was met while walking the messages."""

    texts: list[str] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)  # whatever else a template may show the model
    tokens: int = 0
    images: int = 0

    def part(self, part: Any, where: str) -> str:
        """One content part; returns its text, if it is text."""
        if not isinstance(part, dict):
            raise malformed(f"{where} must be an object with a 'type'.", where)
        kind, text = part.get("type"), part.get("text")
        if kind is not None and not isinstance(kind, str):
            raise malformed(f"{where}.type must be a text.", where)
        if kind in _TEXT_PARTS or (kind is None and isinstance(text, str)):
            if isinstance(text, str):
                self.texts.append(text)
                return text
            self.others.append(part)
        elif kind in _IMAGE_PARTS or kind in _MEDIA_PARTS:
            self.images += kind in _IMAGE_PARTS
            self.tokens += IMAGE_TOKENS
        else:
            self.others.append(part)
        return ""

    def total(self) -> int:
        """Tokens of all that was met; what is no text counts by its JSON text."""
        tokens = self.tokens + _estimated("\n".join(self.texts))
        try:
            return tokens + (_estimated(json.dumps(self.others, ensure_ascii=False)) if self.others else 0)
        except RecursionError:
            raise malformed("'messages' is nested too deeply.", "messages") from None


def chat_prompt(fields: Mapping[str, bytes]) -> Prompt:
    """The prompt of a chat request; raises Refused(malformed)."""
    if "messages" not in fields:
        raise malformed("'messages' is missing: send a list of messages, each with a role and content.", "messages")
    messages = decoded(fields["messages"], "messages")
    if not isinstance(messages, list) or not messages:
        raise malformed("'messages' must be a list with at least one message.", "messages")
    reading = _Reading()
    said = [_message(message, f"messages[{at}]", reading) for at, message in enumerate(messages)]
    text, context, reply = _last_turns(said)
    tokens = reading.total() + MESSAGE_TOKENS * len(messages) + TAIL_TOKENS
    return Prompt(
        tokens=tokens + sum(estimate(fields[name]) for name in _READ_TOO if name in fields),
        text=_excerpt(text),
        context=_excerpt(context),
        reply=_excerpt(reply),
        turns=sum(role == "user" for role, _ in said),
        images=reading.images,
        tools=_length(fields.get("tools")),
    )


def text_prompt(fields: Mapping[str, bytes]) -> tuple[Prompt, int]:
    """The prompt of a completion request and how many prompts it holds; raises Refused(malformed)."""
    if "prompt" not in fields:
        raise malformed("'prompt' is missing: send a text, or a list of texts.", "prompt")
    value = decoded(fields["prompt"], "prompt")
    prompts = value if isinstance(value, list) and value and not _is_tokens(value) else [value]
    texts = [prompt for prompt in prompts if isinstance(prompt, str) and prompt]
    ids = [prompt for prompt in prompts if _is_tokens(prompt)]
    if len(texts) + len(ids) < len(prompts):
        message = "'prompt' must be a text, a list of token ids, or a list of those, none of them empty."
        raise malformed(message, "prompt")
    tokens = max(len(texts), _estimated("\n".join(texts))) + sum(map(len, ids))
    tokens += sum(estimate(fields[name]) for name in _READ_TOO if name in fields)
    return Prompt(tokens=tokens + 1, text=_excerpt(texts[0]) if texts else ""), len(prompts)


def _message(message: Any, where: str, reading: _Reading) -> tuple[str, str]:
    """Role and text of one message."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise malformed(f"{where} must be an object with a 'role' and 'content'.", where)
    content = message.get("content")
    text = ""
    if isinstance(content, str):
        text = content
        reading.texts.append(text)
    elif isinstance(content, list):
        text = "\n".join(reading.part(part, f"{where}.content[{at}]") for at, part in enumerate(content))
    elif content is not None:
        raise malformed(f"{where}.content must be a text or a list of parts.", f"{where}.content")
    for name, value in message.items():
        if name not in ("role", "content") and value:
            reading.others.append(value)
    return message["role"], text


def _last_turns(said: list[tuple[str, str]]) -> tuple[str, str, str]:
    """The last user turn, the user turn before it, and what the assistant said between them."""
    users = [at for at, (role, _) in enumerate(said) if role == "user"]
    if not users:
        return "", "", ""
    last = users[-1]
    before = users[-2] if len(users) > 1 else None
    reply = next((text for role, text in reversed(said[:last]) if role == "assistant"), "")
    return said[last][1], said[before][1] if before is not None else "", reply


def _estimated(text: str) -> int:
    return estimate(text.encode("utf-8", "surrogatepass"))


def _excerpt(text: str) -> str:
    return text if len(text) <= _HEAD + _END else text[:_HEAD] + text[-_END:]


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _length(text: bytes | None) -> int:
    value = decoded(text, "tools") if text is not None else None
    if value is not None and not isinstance(value, list):
        raise malformed("'tools' must be a list.", "tools")
    return len(value or ())
