"""What a configuration may already say but this version does not do: refused or warned about, never silent."""

from __future__ import annotations

from gateway.config.schema import Config


def refused(config: Config) -> list[str]:
    """Mistakes to mend before this version can serve `config`."""
    told = []
    if config.store.shared:
        told.append("store: a Redis store is not supported by this version; write `store: memory`")
    if config.listen.server != "asgi":
        told.append("listen.server: only asgi is supported by this version")
    return told


def warned(config: Config) -> list[str]:
    """Parts that have no effect yet."""
    told = []
    if config.canary is not None:
        told.append("canary: has no effect in this version; every call is served by the stable release")
    for name, route in config.routes.items():
        if route.classifier is not None:
            told.append(
                f"routes.{name}.classifier: prompts are scored by cues; model, share_large, abstain have no effect yet"
            )
    return told
