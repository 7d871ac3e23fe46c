"""YAML text to plain values, keeping the line of every place and taking no scalar for what it does not look like."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import yaml
import yaml.reader

from gateway.config.mistakes import Loc, Mistake, dotted

MAX_NODES = 100_000  # aliases can multiply a small text without end
INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
DECIMAL = re.compile(r"-?(0|[1-9][0-9]*)\.[0-9]+")
NUMBER_LIKE = re.compile(r"[-+]?(\.?[0-9][0-9_.]*([eE][-+]?[0-9]+)?|0[xob][0-9a-fA-F_]+|\.(inf|nan))", re.IGNORECASE)
WORDS: Mapping[str, bool | None] = MappingProxyType({"true": True, "false": False, "null": None, "~": None, "": None})
SWITCHES = frozenset({"yes", "no", "on", "off"})
VARIABLE = re.compile(r"\$(?:(?P<dollar>\$)|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|(?P<stray>))")
STRING_TAG = "tag:yaml.org,2002:str"
CORE_TAGS = "tag:yaml.org,2002:"


class FromEnv(str):
    """Text that came from the environment; `origin` is what the file says, and all that may be shown of it."""

    __slots__ = ("origin",)

    def __new__(cls, value: str, origin: str) -> FromEnv:  # noqa: D102
        text = super().__new__(cls, value)
        text.origin = origin
        return text

    origin: str


class Unusable:
    """Stands where a value was already reported, so that it is not reported again as missing."""


UNUSABLE = Unusable()


@dataclass(slots=True)
class Tree:
    """The values of a file, the line of every place in it, and what was wrong so far."""

    data: object = None
    lines: dict[Loc, int] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    unusable: set[Loc] = field(default_factory=set)

    def line(self, loc: Loc) -> int:
        """Line of a place, or of the nearest place around it that is in the file."""
        while loc and loc not in self.lines:
            loc = loc[:-1]
        return self.lines.get(loc, 1)

    def report(self, loc: Loc, message: str, line: int | None = None) -> None:
        """Note a mistake at a place."""
        self.mistakes.append(Mistake(dotted(loc), line or self.line(loc), message))

    def known_bad(self, loc: Loc) -> bool:
        """Whether this place, or one around it, holds UNUSABLE."""
        return any(loc[:size] in self.unusable for size in range(len(loc) + 1))


def parse(text: str, env: Mapping[str, str]) -> Tree:
    """The tree of a YAML text with `${NAME}` filled in from `env`; mistakes are noted in it, not raised."""
    tree = Tree()
    try:
        node = yaml.SafeLoader(text).get_single_node()
        if node is None:
            tree.report((), "the file is empty", 1)
        else:
            tree.data = Reader(tree, env).value(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        told = ": ".join(part for part in (error.context, error.problem) if part)
        tree.report((), f"this is not YAML: {told}", mark.line + 1 if mark else 1)
    except yaml.reader.ReaderError as error:
        tree.report((), f"this is not YAML text: {error.reason}", text.count("\n", 0, error.position) + 1)
    except RecursionError:
        tree.report((), "nested too deeply", 1)
    return tree


class Reader:
    """Walks composed YAML nodes; a place that cannot be used becomes UNUSABLE and a mistake."""

    def __init__(self, tree: Tree, env: Mapping[str, str]) -> None:
        self.tree = tree
        self.env = env
        self.open: set[int] = set()
        self.seen = 0

    def value(self, node: yaml.Node, loc: Loc) -> object:
        """The value of a node."""
        self.tree.lines.setdefault(loc, node.start_mark.line + 1)
        self.seen += 1
        if id(node) in self.open or self.seen > MAX_NODES:
            return self.bad(loc, "an alias (*name) that contains itself or repeats too much")
        if not node.tag.startswith(CORE_TAGS):
            return self.bad(loc, f"the tag {node.tag} is not known here; quote the value if it starts with '!'")
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, loc)
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*loc, index)) for index, item in enumerate(node.value)]
            return self.scalar(node, loc) if isinstance(node, yaml.ScalarNode) else UNUSABLE
        finally:
            self.open.discard(id(node))

    def mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, object]:
        """A mapping; a key without a value is left out, so that it means the default."""
        values: dict[str, object] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = self.key(key_node, loc, line)
            if key is None:
                continue
            place = (*loc, key)
            if key in first:
                self.tree.report(place, f"{key!r} is written twice, on lines {first[key]} and {line}; keep one", line)
                continue
            first[key] = line
            self.tree.lines[place] = line
            value = self.value(value_node, place)
            if value is not None:
                values[key] = value
        return values

    def key(self, node: yaml.Node, loc: Loc, line: int) -> str | None:
        """A key, which must be text; None when it is not."""
        if node.tag == "tag:yaml.org,2002:merge":
            self.tree.report((*loc, "<<"), "merging with << is not supported; write the keys out", line)
        elif not isinstance(node, yaml.ScalarNode):
            self.tree.report(loc, "a key must be text, not a list or a mapping", line)
        elif node.style is None and (node.value in WORDS or node.tag != STRING_TAG or not_text(node.value)):
            told = f"the key {node.value!r} is not text to YAML; write it in quotes"
            self.tree.report((*loc, node.value), told, line)
        else:
            return str(node.value)
        return None

    def scalar(self, node: yaml.ScalarNode, loc: Loc) -> object:
        """A scalar: plain ones may be numbers, true/false or nothing; the rest is text."""
        text = str(node.value)
        if node.style is None:
            if text in WORDS:
                return WORDS[text]
            if INTEGER.fullmatch(text):
                return int(text) if len(text) <= 18 else self.bad(loc, f"{text[:30]} is too large a number")
            if DECIMAL.fullmatch(text):
                return float(text)
            if told := not_text(text) or typed_by_yaml(node):
                return self.bad(loc, f"{text!r} {told}")
        return self.filled(text, loc) if "$" in text else text

    def filled(self, text: str, loc: Loc) -> object:
        """The text with its variables filled in, after parsing: a value may hold any character."""
        wrong: list[str] = []

        def fill(match: re.Match[str]) -> str:
            if match["dollar"]:
                return "$"
            name = match["name"]
            if name is None:
                wrong.append("a single $: write ${NAME} for a variable or $$ for the character")
                return ""
            if self.env.get(name):
                return self.env[name]
            if match["default"] is None:
                state = "empty" if name in self.env else "not set"
                wrong.append(f"the environment variable {name} is {state}; set it, or write ${{{name}:-default}}")
            return match["default"] or ""

        value = VARIABLE.sub(fill, text)
        if wrong:
            return self.bad(loc, "; ".join(dict.fromkeys(wrong)))
        return FromEnv(value, text)

    def bad(self, loc: Loc, message: str) -> Unusable:
        """Note a mistake and put UNUSABLE in its place."""
        self.tree.unusable.add(loc)
        self.tree.report(loc, message)
        return UNUSABLE


def not_text(text: str) -> str:
    """Why a plain scalar that is no plain number or word is refused: readers of YAML disagree on it. "" if fine."""
    lower = text.lower()
    if lower in SWITCHES or (lower in {"true", "false", "null"} and text != lower):
        return (
            "is true, false or nothing to some readers of YAML and text to others; "
            "write true, false or 0, or put it in quotes if it is text"
        )
    if NUMBER_LIKE.fullmatch(text) and text.count(".") <= 1:
        return (
            "looks like a number in a spelling that readers of YAML take differently; "
            "write digits only (4096, 0.5), or put it in quotes if it is text"
        )
    return ""


def typed_by_yaml(node: yaml.Node) -> str:
    """Why a plain scalar that YAML 1.1 gives a type of its own (a date, 12:30) is refused; "" when it does not."""
    if node.tag == STRING_TAG:
        return ""
    word = node.tag.removeprefix(CORE_TAGS)
    return f"would be read as {word} by YAML 1.1; put it in quotes if it is text"
