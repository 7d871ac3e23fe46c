"""Why a call is not served: one reason, one word, everywhere (JSON code, header, metric label, log field)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from gateway.core.types import Outcome

T = TypeVar("T")


class Reason(Enum):
    """Closed set of refusals: (code, HTTP status, OpenAI error type, may a retry help, outcome)."""

    MALFORMED = ("malformed", 400, "invalid_request_error", False, Outcome.REFUSED)
    UNSUPPORTED_VALUE = ("unsupported_value", 400, "invalid_request_error", False, Outcome.REFUSED)
    PROMPT_TOO_LONG = ("prompt_too_long", 400, "invalid_request_error", False, Outcome.REFUSED)
    MAX_TOKENS_TOO_LARGE = ("max_tokens_too_large", 400, "invalid_request_error", False, Outcome.REFUSED)
    TOO_MANY_CHOICES = ("too_many_choices", 400, "invalid_request_error", False, Outcome.REFUSED)
    CONTEXT_LENGTH_EXCEEDED = ("context_length_exceeded", 400, "invalid_request_error", False, Outcome.REFUSED)
    REQUEST_EXCEEDS_QUOTA = ("request_exceeds_quota", 400, "invalid_request_error", False, Outcome.REFUSED)
    UNAUTHENTICATED = ("unauthenticated", 401, "authentication_error", False, Outcome.REFUSED)
    TIER_FORBIDDEN = ("tier_forbidden", 403, "permission_error", False, Outcome.REFUSED)
    MODEL_FORBIDDEN = ("model_forbidden", 403, "permission_error", False, Outcome.REFUSED)
    UNKNOWN_MODEL = ("unknown_model", 404, "invalid_request_error", False, Outcome.REFUSED)
    UNKNOWN_PATH = ("unknown_path", 404, "invalid_request_error", False, Outcome.REFUSED)
    METHOD_NOT_ALLOWED = ("method_not_allowed", 405, "invalid_request_error", False, Outcome.REFUSED)
    BODY_TIMEOUT = ("body_timeout", 408, "invalid_request_error", False, Outcome.REFUSED)
    BODY_TOO_LARGE = ("body_too_large", 413, "invalid_request_error", False, Outcome.REFUSED)
    UNSUPPORTED_MEDIA_TYPE = ("unsupported_media_type", 415, "invalid_request_error", False, Outcome.REFUSED)
    TENANT_REQUESTS = ("tenant_requests", 429, "rate_limit_error", True, Outcome.REFUSED)
    TENANT_TOKENS = ("tenant_tokens", 429, "rate_limit_error", True, Outcome.REFUSED)
    TENANT_CONCURRENCY = ("tenant_concurrency", 429, "rate_limit_error", True, Outcome.REFUSED)
    TENANT_BUDGET = ("tenant_budget", 429, "rate_limit_error", True, Outcome.REFUSED)
    FAIR_SHARE = ("fair_share", 429, "rate_limit_error", True, Outcome.SHED)
    PAST_KNEE = ("past_knee", 503, "overloaded_error", True, Outcome.SHED)
    DEADLINE_UNREACHABLE = ("deadline_unreachable", 503, "overloaded_error", True, Outcome.SHED)
    QUEUE_TIMEOUT = ("queue_timeout", 503, "overloaded_error", True, Outcome.EVICTED)
    DRAINING = ("draining", 503, "overloaded_error", True, Outcome.SHED)
    NO_ENDPOINT = ("no_endpoint", 503, "overloaded_error", True, Outcome.SHED)
    STORE_UNAVAILABLE = ("store_unavailable", 503, "overloaded_error", True, Outcome.SHED)
    UPSTREAM_ERROR = ("upstream_error", 502, "upstream_error", True, Outcome.FAILED)
    UPSTREAM_TIMEOUT = ("upstream_timeout", 504, "upstream_error", True, Outcome.FAILED)
    INTERNAL_ERROR = ("internal_error", 500, "server_error", True, Outcome.FAILED)
    CLIENT_GONE = ("client_gone", 499, "client_gone", False, Outcome.GONE)
    CLIENT_STALLED = ("client_stalled", 499, "client_stalled", False, Outcome.GONE)

    def __init__(self, code: str, status: int, kind: str, retryable: bool, outcome: Outcome) -> None:
        self.code = code
        self.status = status
        self.kind = kind
        self.retryable = retryable
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Refusal:
    """A call refused: the reason, a sentence that names the field and the fix, and when to come back.

    `retry_after` is in seconds and None where waiting does not help; `param` is the request field.
    """

    reason: Reason
    message: str
    param: str | None = None
    retry_after: float | None = None


class Refused(Exception):
    """A Refusal on its way to the caller; raised only before the first byte of the answer."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason.code)
        self.refusal = refusal


def granted(value: T | Refusal) -> T:
    """The value, or its Refusal raised as Refused."""
    if isinstance(value, Refusal):
        raise Refused(value)
    return value
