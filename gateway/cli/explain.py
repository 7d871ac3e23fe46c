"""`tiergate explain`: what would be decided about a request, with nothing sent."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gateway.api.auth import Keyring
from gateway.api.parse import parse
from gateway.cli.check import loaded
from gateway.config.schema import Config
from gateway.core.caps import apply_caps
from gateway.core.quota import worst_case
from gateway.core.refusal import Refused, granted
from gateway.core.rewrite import CHAT, COMPLETIONS
from gateway.core.tiering import PoolFacts
from gateway.core.types import Tenant
from gateway.runtime.parts import tier_router


def explain(path: Path, request: Path, key: str | None, as_json: bool) -> int:
    """0 if the request would be sent on, 1 if it would be refused (or the files are bad)."""
    config = loaded(path)
    if config is None:
        return 1
    try:
        body = request.read_bytes()
    except OSError as error:
        print(f"{request}: {error.strerror}", file=sys.stderr)
        return 1
    try:
        told, code = _decided(config, body, _tenant(config, key)), 0
    except Refused as refused:
        refusal = refused.refusal
        told, code = {"refused": refusal.reason.code, "status": refusal.reason.status, "message": refusal.message}, 1
    if as_json:
        print(json.dumps(told))
    else:
        print("\n".join(f"{name:>16}: {value}" for name, value in told.items()))
    return code


def _tenant(config: Config, key: str | None) -> Tenant:
    """The tenant of `key`; without one, the first that is configured."""
    tenants = {name: section.as_tenant(name) for name, section in config.tenants.items()}
    if key is None:
        return next(iter(tenants.values()))
    keys = {digest: tenants[name] for name, section in config.tenants.items() for digest in section.keys}
    return Keyring(keys).tenant({b"x-api-key": key.encode()})


def _decided(config: Config, body: bytes, tenant: Tenant) -> dict[str, object]:
    path = COMPLETIONS if b'"prompt"' in body and b'"messages"' not in body else CHAT
    call = granted(apply_caps(parse(path, {}, body, tenant, "explain", 0.0), tenant.caps))
    windows = {name: PoolFacts(pool.window) for name, pool in config.pools.items()}
    choice = granted(tier_router(config).route(call, windows))
    limits = tenant.limits
    return {
        "tenant": tenant.name,
        "band": call.band.label,
        "route": choice.route,
        "tier": choice.tier,
        "pool": choice.pool,
        "why": choice.why,
        "engine model": choice.model,
        "prompt tokens": call.prompt.tokens,
        "max_tokens": choice.call.max_tokens,
        "clamped": choice.call.clamped or "no",
        "sequences": call.choices,
        "quota held": worst_case(choice.call),
        "token limit": limits.tokens.amount if limits.tokens else "none",
        "request limit": limits.requests.amount if limits.requests else "none",
    }
