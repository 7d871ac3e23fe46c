"""The vocabulary of the gateway: what a call, a tenant, an endpoint and an ending are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


class Band(IntEnum):
    """Queueing class of a call; the lower value leaves the queue first."""

    ONLINE = 0
    BATCH = 1

    @property
    def label(self) -> str:
        """Name used in configuration, headers, logs and metrics."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Rate:
    """`amount` units per `period` seconds; the whole amount may be spent at once."""

    amount: float
    period: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What one tenant may use; None is "no limit", 0 is "nothing"."""

    requests: Rate | None = None
    tokens: Rate | None = None
    concurrent: int | None = None
    budget: Rate | None = None


@dataclass(frozen=True, slots=True)
class Caps:
    """Bounds on one call: tokens, sequences; `clamp` lowers max_tokens, otherwise it is refused."""

    default_max_tokens: int = 512
    max_tokens: int = 4096
    clamp: bool = True
    prompt_tokens: int = 16384
    choices: int = 4


@dataclass(frozen=True, slots=True)
class Tenant:
    """One customer: band, weight in fair queueing, tiers it may use (None: all), limits and caps."""

    name: str
    band: Band = Band.ONLINE
    weight: float = 1.0
    tiers: frozenset[str] | None = None
    limits: Limits = Limits()
    caps: Caps = Caps()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is known of a prompt: `tokens` is an estimate over everything the engine will read.

    `text` is the turn that decides the tier (the last user turn), `context` the user turn before it,
    `reply` the assistant turn between them; all three are bounded excerpts, never logged.
    """

    tokens: int
    text: str = ""
    context: str = ""
    reply: str = ""
    turns: int = 1
    images: int = 0
    tools: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One request on its way through the gateway.

    `max_tokens` is per sequence and None until caps are applied; `choices` is how many sequences the
    engine will generate (n or best_of, times prompts); `patience` is the longest the caller waits for
    a first token, in seconds; `arrived` is the gateway clock in seconds; `fields` holds the JSON text of
    every top-level member of the body, untouched.
    """

    id: str
    path: str
    tenant: Tenant
    model: str
    band: Band
    prompt: Prompt
    arrived: float
    stream: bool = False
    wants_usage: bool = False
    max_tokens: int | None = None
    choices: int = 1
    prompts: int = 1
    patience: float | None = None
    fields: Mapping[str, bytes] = field(default_factory=dict)
    clamped: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Model tokens an engine reported (or, when `estimated`, that the gateway counted itself)."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    estimated: bool = False

    @property
    def total(self) -> int:
        """Tokens a quota is charged with."""
        return self.prompt + self.completion


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine server of a pool; `weight` scales its share of the traffic."""

    name: str
    url: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class EndpointLoad:
    """Last good engine metrics of an endpoint; None is "unknown", never 0. `at` is the gateway clock, s."""

    at: float
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    preemptions: float | None = None
    kv_block_size: int | None = None
    kv_blocks: int | None = None


class Outcome(StrEnum):
    """How a call ended; the label of `tiergate_requests_total`."""

    OK = "ok"
    REFUSED = "refused"
    SHED = "shed"
    EVICTED = "evicted"
    FAILED = "failed"
    GONE = "gone"


@dataclass(slots=True)
class Record:
    """What is told about one call when it is over (log line, metrics); never the prompt, never a key.

    Durations in seconds; None means the call did not get that far. `reason` is a Reason code or "".
    `overhead` is the time spent in the gateway itself: neither waiting nor with the engine.
    """

    id: str
    path: str = ""
    tenant: str = ""
    band: str = ""
    model: str = ""
    route: str = ""
    tier: str = ""
    pool: str = ""
    why: str = ""
    release: str = "stable"
    endpoint: str = ""
    stream: bool = False
    outcome: Outcome = Outcome.OK
    reason: str = ""
    detail: str = ""
    status: int = 0
    attempts: int = 0
    wait: float | None = None
    first_token: float | None = None
    inter_token: float | None = None
    duration: float = 0.0
    overhead: float = 0.0
    prompt_estimate: int = 0
    usage: Usage | None = None
    clamped: str = ""
