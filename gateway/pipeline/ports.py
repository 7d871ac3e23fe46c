"""What the path needs of a server face: the client's end of a call."""

from __future__ import annotations

from typing import Protocol

from gateway.core.quota import Remaining
from gateway.core.refusal import Reason

Header = tuple[bytes, bytes]


class Quotas(Protocol):
    """What the path needs of a quota account: what is left, for the answer's headers."""

    @property
    def remaining(self) -> tuple[Remaining | None, Remaining | None]:
        """Requests and tokens left."""


class Reply(Protocol):
    """The client's end of a call; both server faces speak to it. `account` is set once quota was looked at."""

    account: Quotas | None
    started: bool

    async def start(self, status: int, headers: list[Header], length: int | None) -> None:
        """Status and headers; from here on nothing can be refused. `length` in bytes, None: until `end`."""

    async def write(self, data: bytes) -> None:
        """Body bytes; returns when the client can take more."""

    async def end(self) -> None:
        """The answer is complete."""

    async def break_off(self, reason: Reason, message: str) -> None:
        """The answer cannot be completed: an SSE error event and a closed stream, without [DONE]."""
