"""The bytes of vLLM's answers: JSON bodies, SSE events, errors, model list."""

from __future__ import annotations

import json
from collections.abc import Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Protocol

from gateway.sim.waiting import Finish

VERSION = "0.32.0"
_FINGERPRINT = f"vllm-{VERSION}-sim"
_TYPES = MappingProxyType({400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"})

DONE = b"e\r\ndata: [DONE]\n\n\r\n"
NOT_FOUND = b'{"detail":"Not Found"}'
NOT_ALLOWED = b'{"detail":"Method Not Allowed"}'
UNREADABLE = b'{"detail":"There was an error parsing the body"}'


def compact(value: object) -> bytes:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def chunk(event: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(event), event)


def error_fields(status: int, message: str, param: str | None = None, kind: str | None = None) -> dict[str, object]:
    """The error object of vLLM."""
    if kind is None:
        kind = _TYPES.get(status) or HTTPStatus(status).phrase
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_chunks(status: int, message: str) -> bytes:
    """An error inside a stream that has begun: its event, then [DONE] all the same."""
    # Unlike all other JSON of vLLM, this is written with spaces.
    return chunk(b"data: " + json.dumps(error_fields(status, message)).encode() + b"\n\n") + DONE


def model_list(model: str, created: int, max_model_len: int) -> bytes:
    """GET /v1/models."""
    permission = {
        "id": "modelperm-0000000000000000",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    row = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": model,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [permission],
    }
    return compact({"object": "list", "data": [row]})


class Wire(Protocol):
    """One answer's bytes; events come as HTTP chunks. `text` is JSON-safe, counts are tokens."""

    def opening(self) -> bytes:
        """What comes before the first token."""
        ...

    def token(self, index: int, text: str, generated: int, finish: Finish | None = None) -> bytes:
        """One token of sequence `index`."""
        ...

    def usage(self, completion: int) -> bytes:
        """The totals, after the last token."""
        ...

    def whole(self, texts: Sequence[tuple[str, Finish]], completion: int) -> bytes:
        """The body of an answer that is not streamed."""
        ...


class _Frame:
    """What both kinds of answers share: the head of every event, and how usage is written."""

    def __init__(self, head: dict[str, object], prompt_tokens: int, include_usage: bool, continuous: bool) -> None:
        self._head = head
        self._prompt = prompt_tokens
        self._include = include_usage
        # vLLM heeds continuous_usage_stats only beside include_usage.
        self._continuous = include_usage and continuous
        self._event = compact(head)[:-1]

    def _counts(self, completion: int) -> bytes:
        total = self._prompt + completion
        return b'"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d' % (self._prompt, total, completion)

    def _closing(self, generated: int, details: bytes, last: bool) -> bytes:
        usage = b',"usage":{%b%b}' % (self._counts(generated), details) if self._continuous else b""
        # The fingerprint comes once: with the usage event if there is one, otherwise with each sequence's last token.
        fingerprint = b',"system_fingerprint":"%b"' % _FINGERPRINT.encode() if last and not self._include else b""
        return usage + fingerprint + b"}\n\n"

    def _usage(self, completion: int, details: bytes) -> bytes:
        counts, fingerprint = self._counts(completion), _FINGERPRINT.encode()
        tail = b',"choices":[],"usage":{%b%b},"system_fingerprint":"%b"}\n\n' % (counts, details, fingerprint)
        return chunk(b"data: " + self._event + tail)

    def _totals(self, completion: int, created: int | None) -> dict[str, object]:
        details = {"cached_tokens": 0, "created_cache_tokens": created, "multimodal_tokens": None}
        return {
            "prompt_tokens": self._prompt,
            "total_tokens": self._prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": details,
            "completion_tokens_details": None,
        }


class ChatWire(_Frame):
    """/v1/chat/completions: a role event for each choice, then content deltas."""

    def __init__(
        self, answer_id: str, created: int, model: str, *, prompt_tokens: int, choices: int,
        include_usage: bool = False, continuous: bool = False,
    ) -> None:  # fmt: skip
        head: dict[str, object] = {"id": answer_id, "object": "chat.completion.chunk", "created": created}
        super().__init__({**head, "model": model}, prompt_tokens, include_usage, continuous)
        self._choices = choices
        self._starts = [
            b'data: %b,"choices":[{"index":%d,"delta":{"content":"' % (self._event, index) for index in range(choices)
        ]

    def opening(self) -> bytes:
        """The role events, sent with the first token."""
        end = b'"prompt_token_ids":null,"prompt_text":null}\n\n'
        usage = b'"usage":{%b,"completion_tokens_details":null},' % self._counts(0) if self._continuous else b""
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
        return b"".join(
            chunk(b'data: %b,"choices":[{"index":%d,' % (self._event, index) + role + usage + end)
            for index in range(self._choices)
        )

    def token(self, index: int, text: str, generated: int, finish: Finish | None = None) -> bytes:
        """One token's event, its chunk framing included."""
        reason = b"null" if finish is None else b'"%b","stop_reason":null' % finish.encode()
        end = self._closing(generated, b',"completion_tokens_details":null', finish is not None)
        middle = b'%b"},"logprobs":null,"finish_reason":%b,"token_ids":null}]' % (text.encode(), reason)
        return chunk(self._starts[index] + middle + end)

    def usage(self, completion: int) -> bytes:
        """The usage event, with `choices: []`."""
        return self._usage(completion, b',"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":0}')

    def whole(self, texts: Sequence[tuple[str, Finish]], completion: int) -> bytes:
        """The body of an answer that is not streamed."""
        choices = []
        for index, (text, finish) in enumerate(texts):
            message = {"role": "assistant", "content": text, "refusal": None, "annotations": None, "audio": None}
            message |= {"function_call": None, "reasoning": None}
            ending = {"finish_reason": finish, "stop_reason": None, "token_ids": None, "routed_experts": None}
            choices.append({"index": index, "message": message, "logprobs": None, **ending})
        nothing = dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text"))
        tail = {**nothing, "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
        head = {**self._head, "object": "chat.completion", "choices": choices, "service_tier": None}
        totals = self._totals(completion, 0)
        return compact({**head, "system_fingerprint": _FINGERPRINT, "usage": totals, **tail})


class CompletionWire(_Frame):
    """/v1/completions: text, no role; index counts over prompts and choices."""

    def __init__(
        self, answer_id: str, created: int, model: str, *, prompt_tokens: int, choices: int,
        include_usage: bool = False, continuous: bool = False,
    ) -> None:  # fmt: skip
        head: dict[str, object] = {"id": answer_id, "object": "text_completion", "created": created, "model": model}
        super().__init__(head, prompt_tokens, include_usage, continuous)
        self._starts = [b'data: %b,"choices":[{"index":%d,"text":"' % (self._event, index) for index in range(choices)]

    def opening(self) -> bytes:
        """Nothing comes before the first text."""
        return b""

    def token(self, index: int, text: str, generated: int, finish: Finish | None = None) -> bytes:
        """One token's event, its chunk framing included."""
        reason = b"null" if finish is None else b'"%b"' % finish.encode()
        ids = b'"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]'
        middle = b'%b","logprobs":null,"finish_reason":%b,%b' % (text.encode(), reason, ids)
        return chunk(self._starts[index] + middle + self._closing(generated, b"", finish is not None))

    def usage(self, completion: int) -> bytes:
        """The usage event, with `choices: []`."""
        return self._usage(completion, b',"prompt_tokens_details":{"cached_tokens":0}')

    def whole(self, texts: Sequence[tuple[str, Finish]], completion: int) -> bytes:
        """The body of an answer that is not streamed."""
        nothing = dict.fromkeys(("stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids", "routed_experts"))
        choices = [
            {"index": index, "text": text, "logprobs": None, "finish_reason": finish, **nothing}
            for index, (text, finish) in enumerate(texts)
        ]
        head = {**self._head, "choices": choices, "service_tier": None, "system_fingerprint": _FINGERPRINT}
        tail = dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "metrics"))
        return compact({**head, "usage": self._totals(completion, None), **tail})
