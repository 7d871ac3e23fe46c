"""The house rules hold in every module, and each check sees the mistake it is there for."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from gateway.config import load
from gateway.config.shipped import shipped
from scripts import sizes

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
GOOD = '"""Does one thing."""\n'


def told(check: sizes.Check, path: str, source: str) -> list[int]:
    return [line for line, _ in check(PurePosixPath(path), source)]


@pytest.mark.parametrize("check", sizes.CHECKS, ids=lambda check: check.__name__)
def test_the_project_keeps_the_rule(check: sizes.Check) -> None:
    found = []
    for folder in sizes.FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = PurePosixPath(file.relative_to(ROOT).as_posix())
            found += [f"{path}:{line}: {what}" for line, what in check(path, file.read_text(encoding="utf-8"))]
    assert found == []


def test_there_is_something_to_check() -> None:
    assert (ROOT / "gateway" / "core" / "types.py").exists()
    assert len(CONFIGS) >= 5


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_shipped_configurations_load(file: Path) -> None:
    assert load(file, {}).pools


@pytest.mark.parametrize("file", sorted((ROOT / "gateway" / "config" / "builtin").glob("*.yaml")), ids=lambda f: f.name)
def test_the_copy_in_the_package_is_the_one_in_configs(file: Path) -> None:
    assert shipped(file.stem) == (ROOT / "configs" / file.name).read_text(encoding="utf-8")


def test_sizes_are_seen() -> None:
    assert told(sizes.module_size, "gateway/core/long.py", GOOD + "x = 1\n" * 300) == [1]
    assert told(sizes.module_size, "gateway/core/long.py", GOOD + "x = 1\n" * 299) == []
    body = "    x = 1\n"
    assert told(sizes.function_size, "gateway/core/f.py", "async def f():\n" + body * 40) == [1]
    assert told(sizes.function_size, "gateway/core/f.py", "def f():\n" + body * 39) == []


def test_names_that_say_nothing_are_seen() -> None:
    assert told(sizes.names, "gateway/core/utils.py", GOOD) == [1]
    assert told(sizes.names, "gateway/common/relay.py", GOOD) == [1]
    assert told(sizes.names, "gateway/core/relay.py", GOOD) == []


@pytest.mark.parametrize("source", ["x = 1\n", '"""no sentence"""\n', "# comment\n"])
def test_a_missing_sentence_is_seen(source: str) -> None:
    assert told(sizes.docstring, "gateway/core/x.py", source) == [1]


def test_a_sentence_is_enough() -> None:
    assert told(sizes.docstring, "gateway/core/x.py", '"""One sentence\nover two lines.\n\nMore"""\n') == []


def test_an_import_inside_a_function_is_seen() -> None:
    assert told(sizes.imports_inside, "gateway/core/x.py", "import a\ndef f():\n    from b import c\n") == [3]


@pytest.mark.parametrize(
    ("path", "handler", "lines"),
    [
        ("gateway/api/auth.py", "except Exception:\n    pass\n", [3]),
        ("gateway/api/auth.py", "except (ValueError, Exception):\n    pass\n", [3]),
        ("gateway/api/auth.py", "except:\n    pass\n", [3]),
        ("gateway/api/auth.py", "except BaseException:\n    pass\n", [3]),
        ("gateway/api/auth.py", "except BaseException:\n    raise\n", []),
        ("gateway/api/auth.py", "except ValueError:\n    pass\n", []),
        (sizes.EDGE, "except Exception:\n    pass\n", []),
    ],
)
def test_catching_everything_is_seen(path: str, handler: str, lines: list[int]) -> None:
    assert told(sizes.broad_excepts, path, "try:\n    f()\n" + handler) == lines


@pytest.mark.parametrize(
    "source",
    ["X = []\n", "X: dict[str, int] = {}\n", "X = set()\n", "X = collections.deque()\n", "X = [n for n in y]\n"],
)
def test_module_state_is_seen(source: str) -> None:
    assert told(sizes.module_state, "gateway/core/x.py", source) == [1]


def test_global_is_seen() -> None:
    assert told(sizes.module_state, "gateway/core/x.py", "X = 1\ndef f():\n    global X\n    X = 2\n") == [3]


@pytest.mark.parametrize(
    "source", ["X = ()\n", "X = frozenset({1})\n", "X = MappingProxyType({1: 2})\n", "__all__ = []\n"]
)
def test_constants_are_no_state(source: str) -> None:
    assert told(sizes.module_state, "gateway/core/x.py", source) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("gateway/core/x.py", "import asyncio"),
        ("gateway/core/x.py", "from time import monotonic"),
        ("gateway/core/x.py", "import pydantic"),
        ("gateway/core/x.py", "from gateway.config import load"),
        ("gateway/config/x.py", "from gateway.telemetry import Metrics"),
        ("gateway/config/x.py", "from gateway import telemetry"),
        ("gateway/dispatch.py", "from gateway.upstream.pool import Pool"),
        ("gateway/pipeline.py", "import gateway.api.app"),
        ("gateway/api/app.py", "from gateway.runtime import build"),
        ("gateway/runtime.py", "import loadtests"),
        ("gateway/newcomer.py", "from gateway.core import types"),
        ("loadtests/sweep.py", "from gateway.config import load"),
        ("router_models/train.py", "from gateway.api.parse import parse"),
    ],
)
def test_an_import_against_the_direction_is_seen(path: str, source: str) -> None:
    assert told(sizes.layers, path, source) == [1]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("gateway/core/x.py", "import dataclasses\nfrom gateway.core.types import Call"),
        (
            "gateway/config/x.py",
            "import yaml\nfrom gateway.core.types import Rate\nfrom gateway.config.tree import parse",
        ),
        ("gateway/pipeline.py", "from gateway.dispatch import Dispatcher\nfrom gateway.core.types import Call"),
        ("gateway/cli/bench.py", "import loadtests.sweep\nfrom gateway.runtime import build"),
        ("gateway/__main__.py", "from gateway.cli import main"),
        ("gateway/cli/about.py", "from gateway import __version__"),
        (
            "loadtests/sweep.py",
            "import asyncio\nimport httpx\nfrom gateway.core.knee import knee\nfrom gateway.sim import engine",
        ),
    ],
)
def test_imports_in_the_direction_pass(path: str, source: str) -> None:
    assert told(sizes.layers, path, source) == []
