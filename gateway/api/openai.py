"""One OpenAI-style call from its bytes to its ending: authenticate, parse, send it down the pipeline, tell the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from gateway.api.auth import Keyring
from gateway.api.errors import error_body, retry_headers
from gateway.api.headers import decision_headers, limit_headers
from gateway.api.parse import check_encoding, clean_id, parse
from gateway.core.refusal import Reason, Refusal, Refused
from gateway.core.types import Outcome, Record
from gateway.pipeline.path import Pipeline
from gateway.pipeline.ports import Header, Reply

_JSON: Header = (b"content-type", b"application/json")


class Exchange(Reply, Protocol):
    """One request on a server face and the reply to it."""

    path: str
    headers: Mapping[bytes, bytes]
    decided: Callable[[], list[Header]]
    ended_by: Reason | None  # who cancelled the call, when it is cancelled

    async def body(self) -> bytes:
        """The whole request body, bounded in size and time; raises Refused."""


class Door:
    """Where calls come in. `ended` is told every call's record, once."""

    def __init__(
        self,
        keyring: Callable[[], Keyring],
        pipeline: Pipeline,
        ended: Callable[[Record], None],
        clock: Callable[[], float],
        dice: Callable[[], float],
        fresh_id: Callable[[], str],
    ) -> None:
        self._keyring = keyring
        self._pipeline = pipeline
        self._ended = ended
        self._clock = clock
        self._dice = dice
        self._fresh_id = fresh_id

    async def answer(self, exchange: Exchange) -> None:
        """Serve one exchange; whatever happens, it ends in one record and, if the client is there, in one answer."""
        arrived = self._clock()
        record = Record(id=clean_id(exchange.headers, self._fresh_id()), path=exchange.path)
        exchange.decided = lambda: decision_headers(record) + _limits(exchange)
        try:
            await self._call(exchange, record)
        except Refused as refused:
            await self._refuse(exchange, record, refused.refusal)
        except asyncio.CancelledError:
            await self._cancelled(exchange, record)
        except Exception as error:  # the one edge: a fault of ours must not take the connection's other calls with it
            logging.getLogger("tiergate").exception("call %s failed inside the gateway", record.id)
            record.detail = type(error).__name__
            await self._refuse(exchange, record, Refusal(Reason.INTERNAL_ERROR, "The gateway failed.", retry_after=1.0))
        finally:
            record.duration = self._clock() - arrived
            self._ended(record)

    async def _call(self, exchange: Exchange, record: Record) -> None:
        tenant = self._keyring().tenant(exchange.headers)
        record.tenant, record.band = tenant.name, tenant.band.label
        check_encoding(exchange.headers)
        body = await exchange.body()
        # A body that trickles in is the client's own time: deadlines and overhead count from here.
        call = parse(exchange.path, exchange.headers, body, tenant, record.id, self._clock())
        record.model, record.stream, record.band = call.model, call.stream, call.band.label
        await self._pipeline.handle(call, exchange, record)

    async def _refuse(self, exchange: Exchange, record: Record, refusal: Refusal) -> None:
        reason = refusal.reason
        record.outcome, record.reason, record.status = reason.outcome, reason.code, reason.status
        if exchange.started:
            # The client has its 200 already: what follows is a failure of the answer, whatever its cause.
            record.outcome, record.status = Outcome.FAILED, 200
            await exchange.break_off(reason, refusal.message)
            return
        body = error_body(reason, refusal.message, refusal.param)
        await exchange.start(reason.status, [_JSON, *retry_headers(refusal, self._dice())], len(body))
        await exchange.write(body)
        await exchange.end()

    async def _cancelled(self, exchange: Exchange, record: Record) -> None:
        """Somebody ended the call: the client left or stalled, or the gateway's time to drain is over."""
        reason = exchange.ended_by
        if reason is None:
            record.outcome, record.reason = Outcome.GONE, Reason.CLIENT_GONE.code
            raise asyncio.CancelledError
        record.outcome, record.reason, record.status = reason.outcome, reason.code, reason.status
        if reason.outcome is not Outcome.GONE:
            await self._refuse(exchange, record, Refusal(reason, "The gateway is shutting down.", retry_after=1.0))


def _limits(exchange: Exchange) -> list[Header]:
    return limit_headers(exchange.account.remaining) if exchange.account else []
