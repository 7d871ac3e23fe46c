"""Health of one endpoint: when it is ejected, when it may be tried again, and what counts as evidence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FailureKind(StrEnum):
    """How a call to an engine failed; the value is the label in logs and metrics."""

    CONNECT = "connect"
    STALE = "stale_connection"
    TIMEOUT_FIRST = "timeout_first"
    TIMEOUT_GAP = "timeout_gap"
    CUT = "cut"
    PROTOCOL = "protocol"
    ENGINE = "engine"


# A crowded engine looks like this too, so flowing tokens outweigh them.
_DOUBTFUL = frozenset((FailureKind.CONNECT, FailureKind.TIMEOUT_FIRST, FailureKind.TIMEOUT_GAP))


class State(StrEnum):
    """Where an endpoint stands with its pool."""

    UP = "up"
    EJECTED = "ejected"
    PROBATION = "probation"


@dataclass(frozen=True, slots=True)
class HealthRules:
    """When to eject and for how long; durations in seconds.

    `eject_after` failures in a row (of calls, or of probes) eject; the first ejection lasts `probation`
    and each failed trial doubles it up to `longest`. An endpoint that sent tokens within the last `quiet`
    seconds is alive, however many connects or waits timed out; a probe's complaint needs `probe_quiet` seconds
    of silence. Answers that break off count in any case: an endpoint that cuts every stream sends tokens too.
    A trial that takes longer than `patience` may be a long answer, so one more is let through then, up to `trials`
    at a time, where no other endpoint could take the call.
    """

    eject_after: int = 3
    probation: float = 10.0
    longest: float = 300.0
    quiet: float = 1.0
    probe_quiet: float = 5.0
    patience: float = 1.0
    trials: int = 16


class Health:
    """The record of one endpoint; the caller owns the clock (`now`, seconds).

    A call is bracketed by `begin` and exactly one of `succeeded`, `failed` or `neutral`, which get back the
    `trial` number that `begin` returned: only a trial decides its probation, and the first to end decides it, so
    a call that was already under way when the endpoint was ejected can neither prolong nor end the ejection.
    """

    def __init__(self, rules: HealthRules) -> None:
        self._rules = rules
        self._state = State.UP
        self._failures = 0
        self._probe_failures = 0
        self._sentence = rules.probation
        self._until = 0.0
        self._cause: FailureKind | None = None
        self._probation = 0  # serial number of the last probation, and what its trials are called
        self._trials = 0
        self._trial_at = float("-inf")
        self._progress_at = float("-inf")
        self.changes = 0

    @property
    def state(self) -> State:
        """Last decided state; an ejection whose time is over shows as ejected until somebody asks `available`."""
        return self._state

    @property
    def reachable(self) -> bool:
        """Not ejected, and not silent to probes: also of a last endpoint, which no probe may eject."""
        return self._state is not State.EJECTED and self._probe_failures < self._rules.eject_after

    @property
    def until(self) -> float:
        """Clock reading at which the current (or last) ejection ends."""
        return self._until

    def available(self, now: float, *, last: bool = False) -> bool:
        """May a call be sent now? In probation: while no other trial is out.

        `last`: no other endpoint of the pool could take the call. Then one slow trial does not block the way
        for longer than `patience`; whoever leaves during a trial (`neutral`) makes nobody wait anew.
        """
        if self._state is State.EJECTED and now >= self._until:
            self._become(State.PROBATION)
        if self._state is State.PROBATION:
            slow = now - self._trial_at >= self._rules.patience
            return self._trials == 0 or (last and slow and self._trials < self._rules.trials)
        return self._state is State.UP

    def begin(self, now: float) -> int:
        """A call goes out; the number of the probation it is a trial of (hand it back at its end), 0 for none."""
        if self.available(now, last=True) and self._state is State.PROBATION:
            self._trials += 1
            self._trial_at = now
            return self._probation
        return 0

    def succeeded(self, now: float, trial: int = 0) -> None:
        """A call was answered as it should be."""
        self.progress(now)
        if self._state is State.UP:
            self._failures = 0
        if self._close_trial(trial):
            self._failures = 0
            self._sentence = self._rules.probation
            self._become(State.UP)

    def neutral(self, now: float, trial: int = 0) -> None:
        """A call ended without saying anything about the endpoint (4xx, 429, busy 503, client gone)."""
        self._close_trial(trial)

    def failed(self, now: float, kind: FailureKind, trial: int = 0) -> None:
        """A call failed through the endpoint's fault; a stale keep-alive connection is nobody's fault."""
        if kind is FailureKind.STALE:
            self.neutral(now, trial)
        elif self._close_trial(trial):
            self._sentence = min(self._sentence * 2, self._rules.longest)
            self._eject(now, kind)
        elif self._state is State.UP:
            self._failures += 1
            alive = kind in _DOUBTFUL and now - self._progress_at <= self._rules.quiet
            if self._failures >= self._rules.eject_after and not alive:
                self._eject(now, kind)

    def draining(self, now: float, trial: int = 0) -> None:
        """The engine says it takes no more work: ejected at once, though its running streams go on."""
        if self._close_trial(trial) or self._state is State.UP:
            self._eject(now, FailureKind.ENGINE)

    def progress(self, now: float) -> None:
        """Tokens flowed: proof of life that outweighs probes and failures of other calls."""
        self._progress_at = now
        self._probe_failures = 0

    def probed(self, now: float, ok: bool, *, last: bool) -> None:
        """A probe ended; `last`: this is the only available endpoint of its pool, which no probe may eject.

        Good probes end an ejection early only where connecting was the trouble: a frozen engine answers
        probes for ever, so for any other cause time and a trial decide.
        """
        if ok or now - self._progress_at <= self._rules.probe_quiet:
            self._probe_failures = 0
        else:
            self._probe_failures += 1
        if ok and self._state is State.EJECTED and self._cause is FailureKind.CONNECT:
            self._become(State.PROBATION)
        if self._state is State.UP and self._probe_failures >= self._rules.eject_after and not last:
            self._eject(now, FailureKind.CONNECT)

    def _close_trial(self, trial: int) -> bool:
        """Take the trial back; True if its probation is still undecided."""
        if self._state is not State.PROBATION or trial != self._probation:
            return False
        self._trials -= 1
        return True

    def _eject(self, now: float, cause: FailureKind) -> None:
        self._until = now + self._sentence
        self._cause = cause
        self._failures = self._probe_failures = 0
        self._become(State.EJECTED)

    def _become(self, state: State) -> None:
        if state is not self._state:
            self._state = state
            self.changes += 1
            if state is State.PROBATION:
                self._probation += 1
                self._trials = 0
