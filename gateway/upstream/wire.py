"""What travels between the gateway and one engine connection: a request, a header list, a failure."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.health import FailureKind

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# The client writes these itself: it alone knows the endpoint, the length and that it cannot unzip on the fly.
OWN_HEADERS = HOP_BY_HOP | {b"host", b"content-length", b"accept-encoding", b"expect"}


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request for an engine; headers without host, content-length, connection (the client adds them)."""

    method: bytes
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""


class UpstreamFailed(Exception):
    """A call that an endpoint did not answer properly; `endpoint` and `attempts` are filled in by the pool."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(f"{kind.value}: {detail}")
        self.kind = kind
        self.detail = detail
        self.endpoint = ""
        self.attempts = 0


def end_to_end(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that may be passed on: without framing, hop-by-hop and those that Connection names."""
    dropped = HOP_BY_HOP | {b"content-length"}
    for name, value in headers:
        if name == b"connection":
            dropped = dropped | {token.strip().lower() for token in value.split(b",")}
    return [header for header in headers if header[0] not in dropped]


def request_head(request: Outgoing, host: bytes) -> bytes:
    """The head of `request`, ready to write; ValueError if a header value could smuggle in a line of its own."""
    lines = [b"%b %b HTTP/1.1" % (request.method, request.target), b"host: " + host]
    lines += [b"%b: %b" % header for header in request.headers if header[0].lower() not in OWN_HEADERS]
    lines.append(b"accept-encoding: identity")
    if request.body or request.method not in (b"GET", b"HEAD"):
        lines.append(b"content-length: %d" % len(request.body))
    head = b"\r\n".join(lines)
    if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1 or b"\0" in head:
        raise ValueError("a line break inside a request header")
    if request.target.count(b" "):
        raise ValueError("a space inside a request target")
    return head + b"\r\n\r\n"
