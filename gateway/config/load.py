"""Text or file to Config: parse, check, fill in effective values, or raise every mistake at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gateway.config.asking import CapsSection, Route, Tenant
from gateway.config.crosscheck import crosscheck, found
from gateway.config.mistakes import ConfigError, Loc, Mistake
from gateway.config.schema import Config
from gateway.config.serving import Capacity, CapacityFile, Pool, Timeouts
from gateway.config.tree import UNUSABLE, Tree, parse
from gateway.config.wording import validated


def load(path: str | Path, env: Mapping[str, str]) -> Config:
    """The configuration in a file; paths in it are relative to the file's folder. Raises ConfigError."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError([Mistake("", 1, f"cannot be read: {error.strerror}")], str(path)) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError([Mistake("", line, "this is not UTF-8 text")], str(path)) from None
    return loads(text, env, folder=file.parent, source=str(path))


def loads(text: str, env: Mapping[str, str], *, folder: str | Path = ".", source: str = "configuration") -> Config:
    """The configuration in a text; paths in it are relative to `folder`, `source` names it in errors.

    Raises ConfigError with every mistake, each with its path and line.
    """
    tree = parse(text, env)
    files = read_capacities(tree, env, Path(folder))
    config = validated(Config, tree)
    crosscheck(tree)
    if config is None or tree.mistakes:
        raise ConfigError(tree.mistakes, source)
    return effective(config, files)


def read_capacities(tree: Tree, env: Mapping[str, str], folder: Path) -> dict[str, CapacityFile]:
    """Put the contents of capacity files in the place of their names; the files by pool."""
    files: dict[str, CapacityFile] = {}
    for loc, value in list(found(tree.data, "pools.*.capacity")):
        if not isinstance(value, str):
            continue
        capacity, file = read_capacity(folder / value, loc, tree, env)
        files[str(loc[1])] = file
        put(tree.data, loc, capacity)
        if capacity is UNUSABLE:
            tree.unusable.add(loc)
    return files


def read_capacity(path: Path, loc: Loc, tree: Tree, env: Mapping[str, str]) -> tuple[object, CapacityFile]:
    """One capacity file: in_flight and waiting, and its other keys as notes; a missing file is a safe guess."""
    try:
        own = parse(path.read_text(encoding="utf-8"), env)
    except FileNotFoundError:
        return Capacity(), CapacityFile(path, {})
    except (OSError, UnicodeDecodeError) as error:
        tree.report(loc, f"{path} cannot be read: {error}")
        return UNUSABLE, CapacityFile(path, {})
    data = own.data if isinstance(own.data, dict) else {}
    notes = {key: value for key, value in data.items() if key not in Capacity.model_fields}
    if isinstance(own.data, dict):
        own.data = {key: value for key, value in data.items() if key in Capacity.model_fields}
        if "in_flight" not in data:
            own.report(("in_flight",), "is missing")
    capacity = validated(Capacity, own)
    for mistake in own.mistakes:
        tree.report(loc, f"{path}, {mistake}")
    return (UNUSABLE if own.mistakes else capacity), CapacityFile(path, notes)


def put(data: object, loc: Loc, value: object) -> None:
    """Set the value at a place that exists."""
    for part in loc[:-1]:
        data = data[part]  # type: ignore[index]  # `found` came by here
    data[loc[-1]] = value  # type: ignore[index]


def effective(config: Config, files: Mapping[str, CapacityFile]) -> Config:
    """The configuration with everything that one place takes from another filled in, and its warnings."""
    pools = {
        name: pool.resolved(merged_timeouts(config.timeouts, pool.timeouts), files.get(name))
        for name, pool in config.pools.items()
    }
    return config.resolved(
        pools=pools,
        routes={name: effective_route(route, config) for name, route in config.routes.items()},
        tenants={name: effective_tenant(tenant, config) for name, tenant in config.tenants.items()},
        caps=merged_caps(CapsSection(), config.caps),
        warnings=tuple(warnings(config, pools)),
    )


def merged_timeouts(whole: Timeouts, own: Timeouts) -> Timeouts:
    """A pool's timeouts: what it writes itself, else those of the file."""
    return whole.model_copy(update={key: getattr(own, key) for key in own.model_fields_set})


def merged_caps(whole: CapsSection, own: CapsSection) -> CapsSection:
    """A tenant's caps: what it writes itself, else those of the file; the default never exceeds the limit."""
    longest = own.max_tokens
    update = {key: getattr(longest, key) for key in longest.model_fields_set}
    max_tokens = whole.max_tokens.model_copy(update=update)
    max_tokens = max_tokens.model_copy(update={"default": min(max_tokens.default, max_tokens.limit)})
    update = {key: getattr(own, key) for key in own.model_fields_set}
    return whole.model_copy(update={**update, "max_tokens": max_tokens})


def effective_route(route: Route, config: Config) -> Route:
    """A route whose classifier abstains to a tier that exists."""
    if route.classifier is None or route.classifier.abstain is not None:
        return route
    classifier = route.classifier.model_copy(update={"abstain": config.tiers[-1]})
    return route.model_copy(update={"classifier": classifier})


def effective_tenant(tenant: Tenant, config: Config) -> Tenant:
    """A tenant with its tiers, caps and store rule as they apply."""
    return tenant.model_copy(
        update={
            "tiers": config.tiers if tenant.tiers is None else tenant.tiers,
            "caps": merged_caps(merged_caps(CapsSection(), config.caps), tenant.caps),
            "on_error": tenant.on_error or config.store.on_error,
        }
    )


def warnings(config: Config, pools: Mapping[str, Pool]) -> list[str]:
    """What works but is not what one wants for long."""
    told = []
    for name, pool in pools.items():
        file = pool.capacity_file
        if (file is None and "capacity" not in pool.model_fields_set) or (file is not None and not file.path.exists()):
            why = f"{file.path} does not exist yet" if file else "not written"
            told.append(
                f"pools.{name}.capacity: {why}; assuming {pool.capacity.in_flight} calls in flight and "
                f"{pool.capacity.waiting} waiting per endpoint; measure it, see docs/operations.md"
            )
    if not config.admin.keys:
        told.append("admin.keys: none, so nobody can use /admin; `tiergate keys new admin` makes one")
    return told
