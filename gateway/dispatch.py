"""The asyncio shell round one Admission: a future for each call that waits, and one timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from gateway.core.admission import Admission, Admitted
from gateway.core.fairqueue import Ticket
from gateway.core.limit import Sample
from gateway.core.refusal import Refusal, Refused


class Slot:
    """A call's place with one pool's engines, an async context manager: waits in turn, raises Refused when shed.

    The slot is held until the block is left; `wait` is the time in line (s); set `sample` to teach the limit.
    """

    __slots__ = ("_dispatcher", "_outcome", "_patience", "_ticket", "_turn", "sample", "wait")

    def __init__(self, dispatcher: Dispatcher, ticket: Ticket, patience: float | None) -> None:
        self._dispatcher = dispatcher
        self._ticket = ticket
        self._patience = patience
        self._outcome: Admitted | Refusal | None = None
        self._turn: asyncio.Future[None] | None = None
        self.sample: Sample | None = None
        self.wait = 0.0

    async def __aenter__(self) -> Slot:
        self._dispatcher.enter(self._ticket, self, self._patience)
        if self._outcome is None:
            self._turn = asyncio.get_running_loop().create_future()
            try:
                await self._turn
            except asyncio.CancelledError:
                # The turn may have come in the very moment the caller left: either way nothing stays behind.
                self._dispatcher.leave(self._ticket.id, None)
                raise
        if isinstance(self._outcome, Refusal):
            raise Refused(self._outcome)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dispatcher.leave(self._ticket.id, self.sample)

    def decide(self, outcome: Admitted | Refusal, now: float) -> None:
        """Called once by the dispatcher when the call passes or is evicted, at `now` (s)."""
        self._outcome = outcome
        self.wait = now - self._ticket.arrived
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)


class Dispatcher:
    """One pool's line. `clock` gives monotonic seconds."""

    def __init__(self, admission: Admission, clock: Callable[[], float]) -> None:
        self.admission = admission
        self._clock = clock
        self._slots: dict[str, Slot] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None
        self._closed: Refusal | None = None

    def slot(self, ticket: Ticket, patience: float | None = None) -> Slot:
        """The lease of a slot for `ticket`; `patience` is the longest the caller waits for a first token, s."""
        return Slot(self, ticket, patience)

    def enter(self, ticket: Ticket, slot: Slot, patience: float | None) -> None:
        """Put a call in line; raises Refused if it may not wait. Decides at once what can be decided."""
        if self._closed is not None:
            raise Refused(self._closed)
        refusal = self.admission.offer(ticket, self._clock(), patience)
        if refusal is not None:
            raise Refused(refusal)
        self._slots[ticket.id] = slot
        self.pump()

    def leave(self, call_id: str, sample: Sample | None) -> None:
        """A call is over, whether it waited or flew; harmless if it is not here."""
        self._slots.pop(call_id, None)
        self.admission.cancel(call_id)
        self.admission.finish(call_id, self._clock(), sample)
        self.pump()

    def pump(self) -> None:
        """Let everybody pass or go whose time it is; call it when the limit or the engines' load changed."""
        now = self._clock()
        for decided in self.admission.poll(now):
            if isinstance(decided, Admitted):
                self._slots[decided.id].decide(decided, now)
            else:
                self._slots.pop(decided.id).decide(decided.refusal, now)
        self._arm(self.admission.next_deadline())

    def close(self, refusal: Refusal) -> None:
        """Refuse newcomers from now on; who waits already is still served."""
        self._closed = refusal

    def evict_all(self, refusal: Refusal) -> None:
        """Refuse everybody who still waits."""
        for evicted in self.admission.evict_all(refusal):
            self._slots.pop(evicted.id).decide(evicted.refusal, self._clock())

    def _arm(self, due: float | None) -> None:
        if due == self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = due
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - self._clock()), self._ring)

    def _ring(self) -> None:
        self._timer = self._due = None
        self.pump()
