"""Configurations that come with the package, readable from an installed wheel too."""

from __future__ import annotations

from importlib.resources import files


def shipped(name: str) -> str:
    """The text of a shipped configuration, such as "demo"; FileNotFoundError when there is none of that name."""
    return (files("gateway.config") / "builtin" / f"{name}.yaml").read_text(encoding="utf-8")
