"""Who is calling: an API key to its tenant, compared in constant time, never kept in the clear."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from gateway.core.refusal import Reason, Refusal, Refused
from gateway.core.types import Tenant

_BEARER = b"bearer "
_LONGEST_KEY = 512


def key_hash(key: bytes | str) -> str:
    """The form in which a key is stored: `sha256:` and 64 hexadecimal digits."""
    raw = key.encode() if isinstance(key, str) else key
    return "sha256:" + hashlib.sha256(raw).hexdigest()


def presented_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The key a request carries: `Authorization: Bearer KEY`, else `x-api-key: KEY`."""
    authorization = headers.get(b"authorization", b"")
    if authorization[: len(_BEARER)].lower() == _BEARER:
        key = authorization[len(_BEARER) :].strip()
    else:
        key = headers.get(b"x-api-key", b"").strip()
    return key if key and len(key) <= _LONGEST_KEY else None


class Keyring:
    """Key hashes of all tenants."""

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        self._tenants = {digest: (digest.encode(), tenant) for digest, tenant in tenants.items()}

    def tenant(self, headers: Mapping[bytes, bytes]) -> Tenant:
        """The tenant of a request's key; raises Refused(unauthenticated)."""
        key = presented_key(headers)
        if key is None:
            raise Refused(
                _refusal("No API key was sent. Send it as 'Authorization: Bearer KEY' (or 'x-api-key: KEY').")
            )
        digest = key_hash(key)
        stored, tenant = self._tenants.get(digest, (b"", None))
        if tenant is None or not hmac.compare_digest(stored, digest.encode()):
            raise Refused(_refusal("This API key is not known here. Check it, or ask the operator for a new one."))
        return tenant


def _refusal(message: str) -> Refusal:
    return Refusal(Reason.UNAUTHENTICATED, message, param="authorization")
