"""Field types of the configuration: each says in plain words what it takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import attrgetter
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

from pydantic import BeforeValidator, PlainSerializer, PlainValidator, SecretStr

from gateway.config.mistakes import did_you_mean
from gateway.config.values import (
    Address,
    Comparison,
    Freeze,
    address,
    comparison,
    duration,
    flag,
    freeze,
    number,
    rate,
    rate_text,
    shown,
    size,
    text,
    whole,
)
from gateway.core.types import Band, Rate

T = TypeVar("T")

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
HASH = re.compile(r"sha256:[0-9a-f]{64}")
STORE_SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")


def name(value: object) -> str:
    """A name: it becomes a metric label and a header value."""
    if isinstance(value, str) and NAME.fullmatch(value):
        return str(value)
    raise ValueError(f"a name has 1 to 64 of the characters A-Z a-z 0-9 . _ -; not {shown(value)}")


def key_hash(value: object) -> str:
    """The SHA-256 of an API key, never the key itself (which is not repeated in the message)."""
    if isinstance(value, str) and HASH.fullmatch(value):
        return str(value)
    raise ValueError(
        'must be "sha256:" and 64 hex digits in lower case; `tiergate keys new TENANT` makes a key and prints it'
    )


def web_address(value: object) -> str:
    """URL of an engine: scheme, host and port; paths are the gateway's to add."""
    if isinstance(value, str):
        try:
            parts = urlsplit(value)
            fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            fine = False
        if fine and parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username is not None):
            return str(value).rstrip("/")
    raise ValueError(
        f'must be "http://host:port" without path or password, such as "http://10.0.0.11:8000"; not {shown(value)}'
    )


def store_url(value: object) -> str:
    """`memory`, or a Redis URL; it may hold a password, so it is not repeated."""
    if isinstance(value, str):
        scheme, separator, rest = value.partition("://")
        if value == "memory" or (scheme in STORE_SCHEMES and separator and rest.strip("/")):
            return str(value)
    raise ValueError(f"must be memory, or a URL that starts with one of {', '.join(s + '://' for s in STORE_SCHEMES)}")


def band(value: object) -> Band:
    """A queueing class by its name."""
    for known in Band:
        if value == known.label:
            return known
    raise ValueError(f"must be online or batch, not {shown(value)}")


def queue_limit(value: object) -> int | None:
    """A count of waiting calls, or None for `auto` (follow the knee)."""
    if isinstance(value, str) and value == "auto":
        return None
    try:
        count = whole(value)
    except ValueError:
        raise ValueError(f"must be auto or a whole number, not {shown(value)}") from None
    if count < 0:
        raise ValueError("must be auto, or 0 or more")
    return count


def secret(value: object) -> SecretStr:
    """Text that is not shown again."""
    if isinstance(value, str) and value.strip():
        return SecretStr(str(value))
    raise ValueError("must be text, such as ${ENGINE_KEY}, and not empty")


def short_store(value: object) -> object:
    """A store given as its URL only is a store with the default settings."""
    return {"url": value} if isinstance(value, str) else value


def one_of(*words: str) -> BeforeValidator:
    """Takes one of these words only."""

    def check(value: object) -> str:
        if isinstance(value, str) and value in words:
            return str(value)
        hint = did_you_mean(value, words) if isinstance(value, str) else ""
        raise ValueError(f"must be one of {', '.join(words)}; not {shown(value)}{hint}")

    return BeforeValidator(check)


def rows(least: int = 0) -> BeforeValidator:
    """Takes a list with at least so many items."""

    def check(value: object) -> tuple[object, ...]:
        if not isinstance(value, list):
            raise ValueError(f"must be a list, such as [a, b]; not {shown(value)}")
        if len(value) < least:
            raise ValueError("must not be empty")
        return tuple(value)

    return BeforeValidator(check)


def named(thing: str, least: int = 1) -> BeforeValidator:
    """Takes a mapping from names to things, with at least so many of them."""

    def check(value: object) -> object:
        if not isinstance(value, dict):
            raise ValueError(f"must be a mapping from {thing} names to {thing}s, not {shown(value)}")
        if len(value) < least:
            raise ValueError(f"needs at least one {thing}")
        return value

    return BeforeValidator(check)


def between(
    parse: Callable[[object], T], least: float, most: float | None = None, *, above: bool = False
) -> BeforeValidator:
    """Parses, then takes only values from `least` (or `above` it) to `most`."""
    asked = f"more than {least:g}" if above else f"{least:g} or more"
    if most is not None:
        asked = f"between {least:g} and {most:g}"

    def check(value: object) -> T:
        parsed = parse(value)
        amount = float(parsed)  # type: ignore[arg-type]
        if amount < least or (above and amount == least) or (most is not None and amount > most):
            raise ValueError(f"must be {asked}, not {shown(value)}")
        return parsed

    return BeforeValidator(check)


Name = Annotated[str, BeforeValidator(name)]
KeyHash = Annotated[str, BeforeValidator(key_hash)]
WebAddress = Annotated[str, BeforeValidator(web_address)]
StoreUrl = Annotated[str, BeforeValidator(store_url)]
Text = Annotated[str, BeforeValidator(text)]
Flag = Annotated[bool, BeforeValidator(flag)]
Seconds = Annotated[float, BeforeValidator(duration)]
PositiveSeconds = Annotated[float, between(duration, 0, above=True)]
Bytes = Annotated[int, BeforeValidator(size)]
Count = Annotated[int, between(whole, 0)]
PositiveCount = Annotated[int, between(whole, 1)]
Fraction = Annotated[float, between(number, 0, 1)]
Weight = Annotated[float, between(number, 0, above=True)]
QueueLimit = Annotated[int | None, PlainValidator(queue_limit)]
RateField = Annotated[Rate, PlainValidator(rate), PlainSerializer(rate_text, return_type=str)]
AddressField = Annotated[Address, PlainValidator(address), PlainSerializer(str, return_type=str)]
ComparisonField = Annotated[Comparison, PlainValidator(comparison), PlainSerializer(str, return_type=str)]
FreezeField = Annotated[Freeze, PlainValidator(freeze), PlainSerializer(str, return_type=str)]
BandField = Annotated[Band, PlainValidator(band), PlainSerializer(attrgetter("label"), return_type=str)]
Secret = Annotated[SecretStr, BeforeValidator(secret)]
Stage = Annotated[int, between(whole, 1, 100)]
