"""Keep a background task running: its death is an error in the log and a new start, never silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

_LOG = logging.getLogger("tiergate.upstream")


class Watch:
    """Runs `work` until `stop`; after a crash it is started again `pause` seconds later."""

    def __init__(self, name: str, work: Callable[[], Coroutine[None, None, None]], pause: float = 1.0) -> None:
        self._name = name
        self._work = work
        self._pause = pause
        self._task: asyncio.Task[None] | None = None
        self._again: asyncio.TimerHandle | None = None
        self.crashes = 0

    def start(self) -> None:
        """Start the task on the running loop."""
        self._again = None
        self._task = asyncio.get_running_loop().create_task(self._work(), name=self._name)
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Cancel the task and wait for its end. Idempotent."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if task is not self._task:
            return
        self.crashes += 1
        _LOG.error("background task %s ended by itself; starting it again", self._name, exc_info=error)
        self._again = asyncio.get_running_loop().call_later(self._pause, self.start)
