"""One reason, one word: codes and statuses are a contract with clients, dashboards and logs."""

from __future__ import annotations

import re

import pytest

from gateway.core.refusal import Reason, Refusal, Refused, granted
from gateway.core.types import Outcome

TABLE = {
    400: "malformed unsupported_value prompt_too_long max_tokens_too_large too_many_choices context_length_exceeded "
    "request_exceeds_quota",
    401: "unauthenticated",
    403: "tier_forbidden model_forbidden",
    404: "unknown_model unknown_path",
    405: "method_not_allowed",
    408: "body_timeout",
    413: "body_too_large",
    415: "unsupported_media_type",
    429: "tenant_requests tenant_tokens tenant_concurrency tenant_budget fair_share",
    499: "client_gone client_stalled",
    500: "internal_error",
    502: "upstream_error",
    503: "past_knee deadline_unreachable queue_timeout draining no_endpoint store_unavailable",
    504: "upstream_timeout",
}
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "upstream_error",
    503: "overloaded_error",
    504: "upstream_error",
}


def test_codes_and_statuses_are_the_published_ones() -> None:
    published = {code: status for status, codes in TABLE.items() for code in codes.split()}
    assert {reason.code: reason.status for reason in Reason} == published


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_is_told_in_one_word_of_its_own(reason: Reason) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", reason.code)
    assert reason.code == reason.name.lower()


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason.status != 499])
def test_the_error_type_follows_the_status(reason: Reason) -> None:
    assert reason.kind == KINDS.get(reason.status, "invalid_request_error")


@pytest.mark.parametrize("reason", Reason)
def test_a_retry_helps_where_the_caller_was_not_at_fault_or_time_heals(reason: Reason) -> None:
    assert reason.retryable == (reason.status == 429 or reason.status >= 500)


@pytest.mark.parametrize(
    ("outcome", "codes"),
    [
        (Outcome.SHED, "fair_share past_knee deadline_unreachable draining no_endpoint store_unavailable"),
        (Outcome.EVICTED, "queue_timeout"),
        (Outcome.FAILED, "upstream_error upstream_timeout internal_error"),
        (Outcome.GONE, "client_gone client_stalled"),
        (Outcome.OK, ""),
    ],
)
def test_outcomes_tell_shed_from_evicted_from_failed(outcome: Outcome, codes: str) -> None:
    assert {reason.code for reason in Reason if reason.outcome is outcome} == set(codes.split())


def test_granted_hands_on_a_value_and_raises_a_refusal() -> None:
    refusal = Refusal(Reason.PAST_KNEE, "full", retry_after=2.0)
    assert granted(7) == 7
    with pytest.raises(Refused) as refused:
        granted(refusal)
    assert refused.value.refusal is refusal
    assert str(refused.value) == "past_knee"
