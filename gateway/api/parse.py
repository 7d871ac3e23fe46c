"""Bytes of a request to a Call: what the gateway must know is checked, everything else is kept as it came."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from gateway.api.prompts import chat_prompt, decoded, malformed, text_prompt
from gateway.core.refusal import Reason, Refusal, Refused
from gateway.core.rewrite import CHAT
from gateway.core.types import Band, Call, Caps, Prompt, Tenant

_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CLEAN_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_LONGEST_PATIENCE = 86400.0
_LARGEST = 2**31
_SECONDS = re.compile(rb"\d{1,5}(\.\d{1,9})?|\.\d{1,9}")
_SPARE_VALUES = 10_000  # for what is no prompt: schemas, biases, metadata


def clean_id(headers: Mapping[bytes, bytes], fresh: str) -> str:
    """The caller's x-request-id if it is harmless, else `fresh`."""
    given = headers.get(b"x-request-id", b"")
    return given.decode("ascii") if _CLEAN_ID.fullmatch(given) else fresh


def check_encoding(headers: Mapping[bytes, bytes]) -> None:
    """Raises Refused unless the body is plain JSON by its headers."""
    media = headers.get(b"content-type", b"application/json").split(b";")[0].strip().lower()
    if media != b"application/json" and not media.endswith(b"+json"):
        message = "The body must be JSON: send 'Content-Type: application/json'."
        raise Refused(Refusal(Reason.UNSUPPORTED_MEDIA_TYPE, message, param="content-type"))
    if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"", b"identity"):
        message = "Compressed bodies are not accepted: send the JSON as it is, without Content-Encoding."
        raise Refused(Refusal(Reason.UNSUPPORTED_MEDIA_TYPE, message, param="content-encoding"))


def check_values(body: bytes, caps: Caps) -> None:
    """Raises Refused(prompt_too_long) for a body of so many values that its prompt cannot be within the cap.

    Values are counted by what separates them, in text too: each is worth more than half a token in the estimate, and
    taking a hundred thousand of them apart would hold up everybody's calls.
    """
    values = body.count(b",") + body.count(b"{") + body.count(b"[")
    if values > 2 * caps.prompt_tokens + _SPARE_VALUES:
        message = f"The body holds about {values} values, more than an input of {caps.prompt_tokens} tokens can have."
        raise Refused(Refusal(Reason.PROMPT_TOO_LONG, message, param="messages" if b'"messages"' in body else "prompt"))


def members(body: bytes) -> dict[str, bytes]:
    """Top-level members of a JSON object, each as its JSON text; of a name given twice only the last is kept."""
    try:
        found = {name: bytes(text) for name, text in _MEMBERS.decode(body).items()}
        if not body.isascii():
            body.decode()
        return found
    except msgspec.ValidationError:
        raise malformed("The body must be a JSON object.") from None
    except RecursionError:
        raise malformed("The body is nested too deeply.") from None
    except UnicodeDecodeError:
        raise malformed("The body is not valid UTF-8.") from None
    except msgspec.DecodeError:
        return _members_slowly(body)


def parse(path: str, headers: Mapping[bytes, bytes], body: bytes, tenant: Tenant, call_id: str, arrived: float) -> Call:
    """The call that a request asks for; raises Refused(malformed, unsupported_value)."""
    check_values(body, tenant.caps)
    fields = members(body)
    model = _text(fields, "model")
    if not model:
        raise malformed("'model' is missing: name a model, or 'auto' to let the gateway choose.", "model")
    prompt, prompts = _prompt(path, fields)
    prompt = _truncated(prompt, prompts, _value(fields, "truncate_prompt_tokens"))
    stream = _flag(fields, "stream")
    caps = [each for each in (_count(fields, "max_tokens"), _count(fields, "max_completion_tokens")) if each]
    return Call(
        id=call_id,
        path=path,
        tenant=tenant,
        model=model,
        band=_band(fields, headers, tenant),
        prompt=prompt,
        arrived=arrived,
        stream=stream,
        wants_usage=_wants_usage(fields, stream),
        max_tokens=max(caps) if caps else None,
        choices=prompts * max(_count(fields, "n") or 1, _count(fields, "best_of") or 1),
        prompts=prompts,
        patience=_patience(headers),
        fields=fields,
    )


def _members_slowly(body: bytes) -> dict[str, bytes]:
    """Lone surrogates are legal JSON text but not text: the standard library reads and writes them as they were."""
    try:
        value = json.loads(body.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise malformed("The body is not valid UTF-8.") from None
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, json.JSONDecodeError) else "not JSON"
        raise malformed(f"The body is not valid JSON ({reason}).") from None
    if not isinstance(value, dict):
        raise malformed("The body must be a JSON object.")
    return {name: json.dumps(each).encode() for name, each in value.items()}


def _no_constant(name: str) -> None:
    raise json.JSONDecodeError(f"{name} is not JSON", name, 0)


def _prompt(path: str, fields: Mapping[str, bytes]) -> tuple[Prompt, int]:
    return (chat_prompt(fields), 1) if path == CHAT else text_prompt(fields)


def _truncated(prompt: Prompt, prompts: int, most: Any) -> Prompt:
    """The prompt as the engine will read it: vLLM cuts each to `most` tokens (below 1: only to its own window)."""
    if type(most) is not int or most < 1 or prompt.tokens <= most * prompts:
        return prompt
    return replace(prompt, tokens=most * prompts)


def _value(fields: Mapping[str, bytes], name: str) -> Any:
    text = fields.get(name)
    return None if text is None or text == b"null" else decoded(text, name)


def _text(fields: Mapping[str, bytes], name: str) -> str:
    value = _value(fields, name)
    if value is not None and not isinstance(value, str):
        raise malformed(f"'{name}' must be a text.", name)
    return value or ""


def _flag(fields: Mapping[str, bytes], name: str) -> bool:
    value = _value(fields, name)
    if value is not None and not isinstance(value, bool):
        raise malformed(f"'{name}' must be true or false.", name)
    return bool(value)


def _count(fields: Mapping[str, bytes], name: str) -> int | None:
    value = _value(fields, name)
    if value is None:
        return None
    if type(value) is not int or not 1 <= value < _LARGEST:
        raise malformed(f"'{name}' must be a whole number of at least 1.", name)
    return value


def _wants_usage(fields: Mapping[str, bytes], stream: bool) -> bool:
    options = _value(fields, "stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise malformed("'stream_options' must be an object.", "stream_options")
    if not stream:
        raise malformed("'stream_options' is only allowed with \"stream\": true.", "stream_options")
    if any(isinstance(value, dict | list) for value in options.values()):
        raise malformed("The members of 'stream_options' must be plain values.", "stream_options")
    wanted = options.get("include_usage")
    if wanted is not None and not isinstance(wanted, bool):
        raise malformed("'stream_options.include_usage' must be true or false.", "stream_options")
    return bool(wanted)


def _band(fields: Mapping[str, bytes], headers: Mapping[bytes, bytes], tenant: Tenant) -> Band:
    """The tenant's band; a caller may lower itself, never raise itself."""
    asked = headers.get(b"x-tiergate-band")
    if asked is not None and asked not in (b"online", b"batch"):
        message = "'x-tiergate-band' must be 'online' or 'batch'."
        raise Refused(Refusal(Reason.UNSUPPORTED_VALUE, message, param="x-tiergate-band"))
    if asked == b"batch" or fields.get("service_tier") == b'"flex"':
        return Band.BATCH
    return tenant.band


def _patience(headers: Mapping[bytes, bytes]) -> float | None:
    given = headers.get(b"x-tiergate-timeout")
    if given is None:
        return None
    seconds = float(given) if _SECONDS.fullmatch(given) else 0.0
    if not 0 < seconds <= _LONGEST_PATIENCE:
        message = "'x-tiergate-timeout' must be a number of seconds, above 0 and at most 86400."
        raise Refused(Refusal(Reason.UNSUPPORTED_VALUE, message, param="x-tiergate-timeout"))
    return seconds
