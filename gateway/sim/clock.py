"""Runs an engine's steps on the event loop: one timer a step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import isinf

from gateway.sim.engine import Engine, StepResult
from gateway.sim.faults import Faults

# The schedule keeps its pace over short delays of the event loop; what is later than this is not caught up with.
_LATE = 0.05

OnStep = Callable[[StepResult, float, float], None]


class StepClock:
    """Calls `on_step(result, begun, ended)` when a step ends, times in seconds on the loop's clock.

    `faults()` tells the faults in force: a freeze holds the end of the running step and the start of the next.
    """

    def __init__(self, engine: Engine, faults: Callable[[], Faults], on_step: OnStep) -> None:
        self._engine = engine
        self._faults = faults
        self._on_step = on_step
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._result: StepResult | None = None
        self._begun = 0.0
        self._due = 0.0
        self.steps = 0

    def wake(self) -> None:
        """There is work: step until there is none."""
        if self._result is None and self._timer is None:
            self._due = self._loop.time()
            self._go_on()

    def thaw(self) -> None:
        """Look again whether the engine is frozen."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._result is not None and not self._frozen():
            # The held step ends when it is due, at once if that is past.
            self._timer = self._loop.call_at(self._due, self._go_on)
        else:
            self._go_on()

    def stop(self) -> None:
        """No more steps."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._result = None

    def _frozen(self) -> bool:
        return self._loop.time() < self._faults().frozen_until

    def _go_on(self) -> None:
        self._timer = None
        if self._frozen():
            until = self._faults().frozen_until
            # Frozen for good: only `thaw` goes on.
            self._timer = None if isinf(until) else self._loop.call_at(until, self._go_on)
            return
        if self._result is not None:
            self._end(self._result)
        if self._result is None and not self._engine.idle:
            self._begin()

    def _begin(self) -> None:
        self._begun = self._due = max(self._due, self._loop.time() - _LATE)
        self._result = self._engine.step()
        self._due += self._result.duration * self._faults().slow
        self._timer = self._loop.call_at(self._due, self._go_on)

    def _end(self, result: StepResult) -> None:
        self._result = None
        self.steps += 1
        self._on_step(result, self._begun, self._loop.time())
