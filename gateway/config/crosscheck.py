"""Checks across sections, on the values as written, so that they run even where the schema found mistakes."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.config.mistakes import Loc, did_you_mean, dotted
from gateway.config.tree import Tree
from gateway.config.values import quoted

TIER_PLACES = (
    "pools.*.tier",
    "routes.*.default",
    "routes.*.rules.*.tier",
    "routes.*.classifier.abstain",
    "tenants.*.tiers.*",
)
TENANT_PLACES = ("routes.*.spill.down.*", "routes.*.rules.*.when.tenants.*")
KEY_PLACES = ("tenants.*.keys.*", "admin.keys.*")


def crosscheck(tree: Tree) -> None:
    """Note every mistake that takes two places of the file to see."""
    tiers = [value for _, value in found(tree.data, "tiers.*") if isinstance(value, str)]
    known_places(tree, "tier", tiers, TIER_PLACES)
    known_places(tree, "tenant", [str(loc[-1]) for loc, _ in found(tree.data, "tenants.*")], TENANT_PLACES)
    once(tree, [place for pattern in KEY_PLACES for place in found(tree.data, pattern)], "the same key", show=False)
    once(tree, list(found(tree.data, "tiers.*")), "the same tier")
    for loc, _ in found(tree.data, "pools.*"):
        once(
            tree,
            [place for place in found(tree.data, "pools.*.endpoints.*.url") if place[0][:2] == loc],
            "the same URL",
        )
    tiers_have_pools(tree)
    model_names_differ(tree, tiers)
    listeners_differ(tree)


def found(data: object, pattern: str) -> Iterator[tuple[Loc, object]]:
    """Places and values that a pattern such as `pools.*.tier` stands for; what has another shape is passed over."""
    level: list[tuple[Loc, object]] = [((), data)]
    for ask in pattern.split("."):
        level = [((*loc, key), value) for loc, held in level for key, value in inside(held) if ask in ("*", key)]
    yield from level


def inside(held: object) -> list[tuple[str | int, object]]:
    """Keys and values of a mapping, indexes and items of a list, nothing of anything else."""
    if isinstance(held, dict):
        return list(held.items())
    if isinstance(held, list):
        return list(enumerate(held))
    return []


def known_places(tree: Tree, thing: str, known: list[str], patterns: tuple[str, ...]) -> None:
    """Names at these places must be among the known ones."""
    if not known:  # that itself is reported already
        return
    for pattern in patterns:
        for loc, value in found(tree.data, pattern):
            if isinstance(value, str) and value not in known:
                hint = did_you_mean(value, known)
                tree.report(
                    loc, f"{quoted(value)} is not a {thing}; {thing}s are {', '.join(dict.fromkeys(known[:20]))}{hint}"
                )


def once(tree: Tree, places: list[tuple[Loc, object]], what: str, show: bool = True) -> None:
    """Values at these places must differ."""
    first: dict[str, Loc] = {}
    for loc, value in places:
        if not isinstance(value, str):
            continue
        before = first.setdefault(value.rstrip("/"), loc)
        if before is not loc:
            told = f", {quoted(value)}," if show else ""
            tree.report(loc, f"{what}{told} is already at {dotted(before)} (line {tree.line(before)}); keep one")


def tiers_have_pools(tree: Tree) -> None:
    """A tier that no pool serves cannot take a call."""
    pools = list(found(tree.data, "pools.*"))
    served = {value for _, value in found(tree.data, "pools.*.tier") if isinstance(value, str)}
    if not pools or len(list(found(tree.data, "pools.*.tier"))) < len(pools):  # a pool without a tier is reported
        return
    for loc, tier in found(tree.data, "tiers.*"):
        if isinstance(tier, str) and tier not in served:
            tree.report(
                loc, f"no pool serves the tier {quoted(tier)}; add a pool with `tier: {tier}` or remove the tier"
            )


def model_names_differ(tree: Tree, tiers: list[str]) -> None:
    """A caller names a route, a tier or a pool's model: one name must not mean two things."""
    routes = [str(loc[-1]) for loc, _ in found(tree.data, "routes.*")]
    for loc, _ in found(tree.data, "routes.*"):
        if loc[-1] in tiers:
            tree.report(loc, f"{loc[-1]!r} is a route and a tier; give the route another name")
    for loc, model in found(tree.data, "pools.*.model"):
        own = next((value for place, value in found(tree.data, "pools.*.tier") if place[:2] == loc[:2]), None)
        if model in routes:
            tree.report(loc, f"{quoted(model)} is a model and a route; give the route another name")
        elif model in tiers and model != own:
            tree.report(loc, f"{quoted(model)} is the model of tier {quoted(own)} and the name of another tier")


def listeners_differ(tree: Tree) -> None:
    """The two ports must not be one."""
    api = [value for _, value in found(tree.data, "listen.api")]
    for loc, ops in found(tree.data, "listen.ops"):
        if [ops] == api and isinstance(ops, str) and not ops.endswith(":0"):
            tree.report(loc, "is the same address as listen.api; the operations port must be another one")
