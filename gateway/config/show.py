"""A configuration as it may be shown: effective values, without secrets."""

from __future__ import annotations

import re
from typing import Any

from gateway.config.schema import Config

PASSWORD = re.compile(r"(?<=://)([^:@/]*):[^@/]*@")
SHOWN_HEX = 8


def redacted(config: Config) -> dict[str, Any]:
    """Plain JSON values: durations in seconds, sizes in bytes; key hashes shortened, passwords and secrets hidden."""
    shown = config.model_dump(mode="json")
    shown["store"]["url"] = PASSWORD.sub(r"\1:***@", config.store.url)
    for holder in (*shown["tenants"].values(), shown["admin"]):
        holder["keys"] = [key[: len("sha256:") + SHOWN_HEX] + "..." for key in holder["keys"]]
    shown["warnings"] = list(config.warnings)
    return shown
