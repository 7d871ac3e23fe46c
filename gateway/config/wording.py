"""Checks a tree against the schema and says in plain words what does not fit, with the keys a place may have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gateway.config.mistakes import Loc, did_you_mean
from gateway.config.serving import Section
from gateway.config.tree import Tree
from gateway.config.values import shown

S = TypeVar("S", bound=Section)
Pattern = tuple[str, ...]


def validated(model: type[S], tree: Tree) -> S | None:
    """The tree's data as `model`, or None with the mistakes noted in the tree."""
    if tree.known_bad(()) or (tree.data is None and tree.mistakes):
        return None
    if not isinstance(tree.data, dict):
        tree.report((), f"must be a mapping with the keys {', '.join(model.model_fields)}; not {shown(tree.data)}")
        return None
    try:
        return model.model_validate(tree.data)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            note(detail, model, tree)
        return None


def note(detail: ErrorDetails, model: type[Section], tree: Tree) -> None:
    """Turn one finding of pydantic into a mistake, unless its place was reported before."""
    loc = tuple(part for part in detail["loc"] if part != "[key]")
    if tree.known_bad(loc):
        return
    if detail["type"] == "extra_forbidden":
        tree.report(loc, unknown_key(str(loc[-1]), loc[:-1], model))
    elif detail["type"] == "missing":
        tree.report(loc, "is missing")
    else:
        while loc and loc not in tree.lines:  # a place that another spelling stands for, as store: redis://...
            loc = loc[:-1]
        tree.report(loc, finding(detail))


def finding(detail: ErrorDetails) -> str:
    """What is wrong with a value; our own field types already say it well."""
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    if detail["type"] in ("model_type", "dict_type"):
        return f"must be a mapping (key: value), not {shown(detail['input'])}"
    return f"{detail['msg']}; not {shown(detail['input'])}"


def unknown_key(key: str, around: Loc, model: type[Section]) -> str:
    """What to say of a key that the place does not have."""
    schema = tuple(places(model))
    here = next((keys for pattern, keys in schema if fits(around, pattern)), ())
    told = f"unknown key {key!r}"
    if hint := did_you_mean(key, here):
        return told + hint
    elsewhere = [
        ".".join(("<name>" if part == "*" else part) for part in pattern) for pattern, keys in schema if key in keys
    ]
    if elsewhere:
        told += f"; it belongs under {' or '.join(place or 'the top of the file' for place in elsewhere[:3])}"
    return f"{told}; allowed here: {', '.join(here)}"


def places(model: type[Section], at: Pattern = ()) -> Iterator[tuple[Pattern, tuple[str, ...]]]:
    """Every place of the schema that has keys of its own, `*` standing for a name or an index, with those keys."""
    yield at, tuple(model.model_fields)
    for key, field in model.model_fields.items():
        for part, repeated in sections_in(field.annotation, False):
            yield from places(part, (*at, key, "*") if repeated else (*at, key))


def sections_in(annotation: Any, repeated: bool) -> Iterator[tuple[type[Section], bool]]:
    """The sections in a type, and whether they stand in a list or a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation, repeated
    for inner in get_args(annotation):
        yield from sections_in(inner, repeated or get_origin(annotation) in (dict, tuple))


def fits(loc: Loc, pattern: Pattern) -> bool:
    """Whether a place is one that the pattern stands for."""
    return len(loc) == len(pattern) and all(ask in ("*", part) for part, ask in zip(loc, pattern, strict=True))
