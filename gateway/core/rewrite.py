"""The body an engine gets: every member as the caller wrote it, but for the few the gateway decides."""

from __future__ import annotations

import json
from collections.abc import Mapping

from gateway.core.types import Call

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

# Members that steer the engine past the gateway; callers may not set them.
_STRIPPED = frozenset({"priority", "kv_transfer_params", "ec_transfer_params", "vllm_xargs"})
_OUTPUT_CAPS = ("max_tokens", "max_completion_tokens")


def engine_body(call: Call, model: str, priority: int | None) -> bytes:
    """JSON text for the engine: model name, output caps, usage request and priority set; all else byte for byte.

    Every output cap the caller gave is kept but bounded, so whichever the engine obeys is within what was reserved; a
    streamed call always asks for usage (the chunk is hidden again if the caller did not want it).
    """
    members = {name: text for name, text in call.fields.items() if name not in _STRIPPED and name not in _OUTPUT_CAPS}
    members["model"] = json.dumps(model).encode()
    members |= _output_caps(call)
    if call.stream:
        members["stream_options"] = _asking_for_usage(members.get("stream_options"))
    else:
        members.pop("stream_options", None)
    if priority is not None:
        members["priority"] = b"%d" % priority
    return _joined(members)


def _output_caps(call: Call) -> dict[str, bytes]:
    most = call.max_tokens or 1
    given = {name: call.fields[name] for name in _OUTPUT_CAPS if call.fields.get(name, b"null") != b"null"}
    return {name: b"%d" % min(int(text), most) for name, text in given.items()} or {"max_tokens": b"%d" % most}


def _asking_for_usage(options: bytes | None) -> bytes:
    if options is None or options == b"null":
        return b'{"include_usage":true}'
    asked = json.loads(options)
    if not asked.get("include_usage"):
        # Alone it does nothing; beside the usage that the gateway asks for it would put usage on every chunk.
        asked.pop("continuous_usage_stats", None)
    return json.dumps(asked | {"include_usage": True}).encode()


def _joined(members: Mapping[str, bytes]) -> bytes:
    return b"{" + b",".join(_name(name) + b":" + text for name, text in members.items()) + b"}"


def _name(name: str) -> bytes:
    if name.isascii() and name.isidentifier():
        return b'"%b"' % name.encode()
    return json.dumps(name).encode()
