"""Undo gzip or deflate of an engine that compresses although it was asked not to."""

from __future__ import annotations

import zlib

from gateway.core.health import FailureKind
from gateway.upstream.wire import UpstreamFailed

_ONE_STEP = 16 * 1024 * 1024
_ANY_HEADER = 32 + zlib.MAX_WBITS


class Inflater:
    """Decodes one body piece by piece; every error is an UpstreamFailed(PROTOCOL)."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(_ANY_HEADER)

    @property
    def ended(self) -> bool:
        """Was the end of the compressed data seen?"""
        return self._zlib.eof

    def feed(self, data: bytes) -> bytes:
        """What `data` decodes to; bounded, so that a small answer cannot fill the memory."""
        try:
            plain = self._zlib.decompress(data, _ONE_STEP)
        except zlib.error as error:
            raise UpstreamFailed(FailureKind.PROTOCOL, "bad compressed answer") from error
        if self._zlib.unconsumed_tail:
            raise UpstreamFailed(FailureKind.PROTOCOL, "compressed answer of absurd ratio")
        return plain


def inflater_for(headers: list[tuple[bytes, bytes]]) -> Inflater | None:
    """The decoder that `headers` call for, None if the body is plain; UpstreamFailed for codings we cannot undo."""
    codings = [value.strip().lower() for name, value in headers if name == b"content-encoding"]
    codings = [coding for coding in codings if coding not in (b"", b"identity")]
    if not codings:
        return None
    if codings in ([b"gzip"], [b"x-gzip"], [b"deflate"]):
        return Inflater()
    raise UpstreamFailed(FailureKind.PROTOCOL, "an answer in a content-encoding that was not asked for")
