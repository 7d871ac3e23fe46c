"""House rules that ruff and import-linter do not know: sizes, names, module state, layers."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

MODULE_LINES = 300
FUNCTION_LINES = 40
FOLDERS = ("gateway", "loadtests", "router_models", "scripts")
FORBIDDEN_NAMES = frozenset({"utils", "util", "helpers", "helper", "common", "manager", "base"})
EDGE = "gateway/api/openai.py"  # the one place that may catch Exception
MUTABLE_CALLS = frozenset({"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter"})
MUTABLE_NODES = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

LAYERS = (
    frozenset({"cli", "__main__"}),
    frozenset({"runtime"}),
    frozenset({"api"}),
    frozenset({"pipeline"}),
    frozenset({"dispatch", "upstream", "store", "telemetry", "config", "sim"}),
    frozenset({"core"}),
)
NOT_IN_CORE = frozenset({"asyncio", "time", "random", "os", "socket", "logging"})
BESIDE = frozenset({"loadtests", "router_models"})  # packages that cli alone imports
USED_BESIDE = frozenset({"core", "sim"})  # what those may use of the gateway

Finding = tuple[int, str]
Check = Callable[[PurePosixPath, str], Iterator[Finding]]


def module_size(path: PurePosixPath, source: str) -> Iterator[Finding]:
    """A module is short enough to be read in one go."""
    lines = source.count("\n")
    if lines > MODULE_LINES:
        yield 1, f"{lines} lines; {MODULE_LINES} at most"


def function_size(path: PurePosixPath, source: str) -> Iterator[Finding]:
    """So is a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, FUNCTIONS) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {lines} lines; {FUNCTION_LINES} at most"


def names(path: PurePosixPath, source: str) -> Iterator[Finding]:
    """A name says what is inside."""
    for part in (*path.parent.parts, path.stem):
        if part in FORBIDDEN_NAMES:
            yield 1, f"the name {part!r} says nothing; name what is inside"


def docstring(path: PurePosixPath, source: str) -> Iterator[Finding]:
    """A module opens with one sentence that states its job."""
    told = ast.get_docstring(ast.parse(source))
    if not told or not told.split("\n\n")[0].rstrip().endswith((".", "?", "!")):
        yield 1, "does not open with a sentence that states its job"


def imports_inside(path: PurePosixPath, source: str) -> Iterator[Finding]:
    """Imports stand at the top, where the layers can be seen."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, FUNCTIONS):
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    yield node.lineno, f"import inside {function.name}"


def broad_excepts(path: PurePosixPath, source: str) -> Iterator[Finding]:
    """Exception is caught once, at the edge; BaseException only to clean up and raise again."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = {item.id for item in ast.walk(node.type) if isinstance(item, ast.Name)} if node.type else {"Exception"}
        again = any(isinstance(item, ast.Raise) and item.exc is None for item in ast.walk(node))
        if ("Exception" in caught and str(path) != EDGE) or ("BaseException" in caught and not again):
            yield node.lineno, f"catches everything; only {EDGE} may"


def module_state(path: PurePosixPath, source: str) -> Iterator[Finding]:
    """A module holds no state: nothing at its top level can be changed."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        if mutable(value) and [ast.unparse(target) for target in targets] != ["__all__"]:
            yield statement.lineno, "module-level value that can be changed; use a tuple, frozenset or MappingProxyType"


def mutable(value: ast.expr) -> bool:
    """Whether an expression makes a list, mapping or set that can be changed."""
    if isinstance(value, ast.Call):
        function = value.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        return name in MUTABLE_CALLS
    return isinstance(value, MUTABLE_NODES)


def layers(path: PurePosixPath, source: str) -> Iterator[Finding]:
    """Imports go one way; siblings do not import each other; core imports the standard library, minus the world."""
    here = layer_of(path)
    for line, module in imported(source):
        root, _, rest = module.partition(".")
        target = rest.split(".")[0]
        if path.parts[0] in BESIDE and root == "gateway" and target not in USED_BESIDE | {""}:
            yield line, f"{path.parts[0]} imports {module}; only gateway.core and gateway.sim are for it"
        if path.parts[0] != "gateway":
            continue
        if root in BESIDE and here != "cli":
            yield line, f"imports {module}; only cli does that"
        if here == "core" and (root in NOT_IN_CORE or (root != "gateway" and root not in sys.stdlib_module_names)):
            yield line, f"core imports {module}; it has no I/O, clock or dice and needs the standard library only"
        if root == "gateway" and target and not may_import(here, target):
            yield line, f"{here or path.stem} imports {module}, against the one direction"


def layer_of(path: PurePosixPath) -> str:
    """Name of the layer a file belongs to; "" for gateway/__init__.py and what is outside the gateway."""
    if path.parts[0] != "gateway" or path.parts[1] == "__init__.py":
        return ""
    return path.parts[1].removesuffix(".py")


def may_import(here: str, target: str) -> bool:
    """Whether a layer may import another."""
    places = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}
    if here in (target, "__main__"):
        return True
    return here in places and target in places and places[here] < places[target]


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and full name of every module that a source imports; `from gateway import x` counts as gateway.x."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "gateway":
            yield from ((node.lineno, f"gateway.{alias.name}") for alias in node.names if alias.name != "__version__")
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, ("." * node.level) + (node.module or "")


CHECKS: tuple[Check, ...] = (
    module_size,
    function_size,
    names,
    docstring,
    imports_inside,
    broad_excepts,
    module_state,
    layers,
)


def findings(root: Path) -> Iterator[str]:
    """Everything the checks find under a checkout, as `path:line: what`."""
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*.py")):
            path = PurePosixPath(file.relative_to(root).as_posix())
            source = file.read_text(encoding="utf-8")
            for check in CHECKS:
                yield from (f"{path}:{line}: {told}" for line, told in check(path, source))


if __name__ == "__main__":
    found = list(findings(Path(__file__).resolve().parent.parent))
    print("\n".join(found) or "sizes, names, state and layers: good")
    sys.exit(1 if found else 0)
