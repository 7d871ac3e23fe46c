"""`tiergate check`: every mistake of a configuration at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gateway.config.load import load
from gateway.config.mistakes import ConfigError
from gateway.config.schema import Config
from gateway.runtime.notyet import refused, warned


def loaded(path: Path) -> Config | None:
    """The configuration, or None after its mistakes were shown on standard error."""
    try:
        return load(path, os.environ)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return None


def check(path: Path) -> int:
    """0 if `path` can be served, 1 if not."""
    config = loaded(path)
    if config is None:
        return 1
    for mistake in (unbuilt := refused(config)):
        print(f"{path}: {mistake}", file=sys.stderr)
    for warning in (*config.warnings, *warned(config)):
        print(f"warning: {warning}")
    if unbuilt:
        return 1
    print(f"{path}: good ({len(config.pools)} pools, {len(config.routes)} routes, {len(config.tenants)} tenants)")
    return 0
