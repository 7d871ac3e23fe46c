"""An engine's answer on its way to the client: passed as it is, or explained where it is no answer."""

from __future__ import annotations

from gateway.core.health import FailureKind
from gateway.core.refusal import Reason, Refusal, Refused
from gateway.core.types import Outcome, Record, Usage
from gateway.pipeline.ports import Header, Reply
from gateway.store.memory import Account
from gateway.upstream.account import decoded
from gateway.upstream.relay import EngineError, Relay, content_type
from gateway.upstream.wire import UpstreamFailed

_CLIENT_ERROR, _SERVER_ERROR = 400, 500
_NOT_THE_CALLERS = frozenset({401, 403, 407, 429})  # about the gateway's own credentials and load, not the caller's
_BUSY = frozenset({429, 503})  # an engine, or what stands in front of it, has its own limit
_PASSED_HEADERS = frozenset({b"content-type", b"cache-control", b"endpoint-load-metrics"})
_BUSY_RETRY, _GONE_RETRY = 2.0, 5.0
# What a client is told where an engine gives no reason, or one that cannot stand in a stream.
_SAID_NO_MORE = (
    b'{"error":{"message":"The engine refused this request and gave no reason.",'
    b'"type":"invalid_request_error","param":null,"code":"engine_refused"}}'
)
_TIMEOUTS = frozenset({FailureKind.TIMEOUT_FIRST, FailureKind.TIMEOUT_GAP})


def check_status(relay: Relay, account: Account) -> None:
    """An engine's refusal is no answer: it counts as a request of the caller if the caller was at fault."""
    if relay.good:
        return
    if _is_the_callers(relay.status):
        account.used = Usage()
    kind = content_type(relay.headers) or b"application/octet-stream"
    error = EngineError(relay.status, relay.body, retryable=False, verdict=relay.verdict, kind=kind)
    error.endpoint, error.attempts = relay.endpoint, relay.attempts
    raise error


async def relayed(relay: Relay, reply: Reply, record: Record) -> None:
    """Every byte of the answer to the client; a failure on the way becomes an error event."""
    record.status = relay.status
    if reply.started and not relay.streaming:
        raise Refused(Refusal(Reason.UPSTREAM_ERROR, "The engine answered a stream with something else."))
    if not reply.started:
        await reply.start(relay.status, _passed_on(relay.headers), None if relay.streaming else len(relay.body))
    try:
        while data := await relay.read():
            await reply.write(data)
    except UpstreamFailed as failed:
        reason = _reason_of(failed)
        record.outcome, record.reason, record.detail = reason.outcome, reason.code, failed.detail
        await reply.break_off(reason, "The engine stopped in the middle of the answer.")
        return
    if relay.failed:
        record.outcome, record.reason = Outcome.FAILED, Reason.UPSTREAM_ERROR.code
    await reply.end()


async def engine_refused(error: EngineError, reply: Reply, record: Record) -> None:
    """The engine answered, but with an error: its own 4xx passes as it is, anything else is ours to explain."""
    record.endpoint, record.attempts, record.detail = error.endpoint, error.attempts, f"engine {error.status}"
    if not _is_the_callers(error.status):
        raise Refused(_explained(error.status))
    record.status, record.outcome, record.reason = error.status, Outcome.REFUSED, "engine_refused"
    body, kind = (error.body, error.kind) if error.body.strip() else (_SAID_NO_MORE, b"application/json")
    if reply.started:
        told = body if decoded(body) is not None else _SAID_NO_MORE
        await reply.write(b"data: " + b" ".join(told.splitlines()) + b"\n\n")
    else:
        await reply.start(error.status, [(b"content-type", kind)], len(body))
        await reply.write(body)
    await reply.end()


def _is_the_callers(status: int) -> bool:
    return _CLIENT_ERROR <= status < _SERVER_ERROR and status not in _NOT_THE_CALLERS


def _explained(status: int) -> Refusal:
    if status in _BUSY:
        return Refusal(Reason.PAST_KNEE, "The engines are busy and take no more calls.", retry_after=_BUSY_RETRY)
    return Refusal(Reason.UPSTREAM_ERROR, "The engine failed before it began to answer.", retry_after=_BUSY_RETRY)


def unanswered(failed: UpstreamFailed, record: Record) -> Refusal:
    """No engine answered: the caller learns that and no more, the log learns which and why."""
    record.endpoint, record.attempts, record.detail = failed.endpoint, failed.attempts, str(failed)
    reason = _reason_of(failed)
    if reason is Reason.UPSTREAM_TIMEOUT:
        return Refusal(reason, "The engine did not answer in time.", retry_after=_BUSY_RETRY)
    if reason is Reason.NO_ENDPOINT:
        return Refusal(reason, "No engine of this pool can be reached.", retry_after=_GONE_RETRY)
    return Refusal(reason, "The engine failed before it began to answer.", retry_after=_BUSY_RETRY)


def _reason_of(failed: UpstreamFailed) -> Reason:
    if failed.kind in _TIMEOUTS:
        return Reason.UPSTREAM_TIMEOUT
    return Reason.NO_ENDPOINT if failed.kind is FailureKind.CONNECT else Reason.UPSTREAM_ERROR


def _passed_on(headers: list[Header]) -> list[Header]:
    return [header for header in headers if header[0] in _PASSED_HEADERS]
