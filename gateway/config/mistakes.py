"""A mistake in a configuration: where it is, what is wrong, and how such a place is written."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

Loc = tuple[str | int, ...]

PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake: `path` as in `pools.small.endpoints[0].url` ("" is the file itself), `line` counts from 1."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        place = f"{self.path}: " if self.path else ""
        return f"line {self.line}: {place}{self.message}"


class ConfigError(Exception):
    """A configuration that cannot be used, with all its mistakes in the order of their lines."""

    def __init__(self, mistakes: Iterable[Mistake], source: str = "configuration") -> None:
        self.mistakes = sorted(set(mistakes), key=lambda mistake: (mistake.line, mistake.path, mistake.message))
        self.source = source
        super().__init__("\n".join(f"{source}, {mistake}" for mistake in self.mistakes))


def dotted(loc: Loc) -> str:
    """The path of a place, as a person would write it; a key that has dots or spaces is quoted."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            key = part if PLAIN_KEY.fullmatch(part) else f'"{part}"'
            text += f".{key}" if text else key
    return text


def kind_of(value: object) -> str:
    """What a YAML value is, in words."""
    if value is None:
        return "nothing"
    for types, word in (  # true/false first: it is a number to Python
        (bool, "true/false"),
        ((int, float), "a number"),
        (str, "text"),
        (list, "a list"),
        (dict, "a mapping"),
    ):
        if isinstance(value, types):
            return word
    return "something else"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` or the empty string."""
    close = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
