"""The API port's application: `/v1` calls as plain ASGI endpoints, models and health beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from gateway.api.auth import Keyring
from gateway.api.errors import error_body, retry_headers
from gateway.api.faces.asgi import AsgiCalls, Receive, Scope, Send
from gateway.core.refusal import Reason, Refusal, Refused
from gateway.core.rewrite import CHAT, COMPLETIONS
from gateway.core.types import Tenant

_PATHS = (CHAT, COMPLETIONS)
_CREATED = 1767225600  # a fixed date: clients want the field, nobody reads it


class Facts(Protocol):
    """What the API port tells of the gateway."""

    @property
    def ready(self) -> bool:
        """Whether new calls should be sent here."""

    def models(self, tenant: Tenant) -> dict[str, int | None]:
        """Model names `tenant` may ask for, with their context windows in tokens where known."""


class ApiPort:
    """The API port: a call goes straight to its endpoint, everything else through the application.

    The application knows the endpoint too (it answers the other methods); its middleware costs a call more than
    finding the way past it.
    """

    def __init__(self, calls: AsgiCalls, app: FastAPI) -> None:
        self._calls = calls
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in _PATHS:
            await self._calls(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def api_app(calls: AsgiCalls, facts: Facts, keyring: Callable[[], Keyring]) -> FastAPI:
    """The application of the API port. Paths match exactly, there are no redirects and no documentation pages."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.router.routes.extend(Route(path, endpoint=calls, methods=["POST"]) for path in _PATHS)
    app.add_exception_handler(404, _unknown_path)
    app.add_exception_handler(405, _wrong_method)
    app.add_exception_handler(Refused, _refused)

    def listed(request: Request) -> dict[str, int | None]:
        headers = {name.encode("latin-1"): value.encode("latin-1") for name, value in request.headers.items()}
        return facts.models(keyring().tenant(headers))

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, object]:
        return {"object": "list", "data": [_model(name, window) for name, window in listed(request).items()]}

    @app.get("/v1/models/{name}")
    async def model(name: str, request: Request) -> dict[str, object]:
        known = listed(request)
        if name not in known:
            message = f"There is no such model here. Use one of: {', '.join(known)}."
            raise Refused(Refusal(Reason.UNKNOWN_MODEL, message, param="model"))
        return _model(name, known[name])

    @app.api_route("/livez", methods=["GET", "HEAD"])
    @app.api_route("/health", methods=["GET", "HEAD"])
    async def alive() -> dict[str, str]:
        return {"status": "ok"}

    @app.api_route("/readyz", methods=["GET", "HEAD"])
    async def ready(response: Response) -> dict[str, str]:
        response.status_code = 200 if facts.ready else 503
        return {"status": "ready" if facts.ready else "not ready"}

    return app


def _model(name: str, window: int | None) -> dict[str, object]:
    row: dict[str, object] = {"id": name, "object": "model", "created": _CREATED, "owned_by": "tiergate"}
    return row if window is None else row | {"max_model_len": window}


def _shaped(refusal: Refusal) -> Response:
    headers = {name.decode(): value.decode() for name, value in retry_headers(refusal, 0.0)}
    body = error_body(refusal.reason, refusal.message, refusal.param)
    return Response(body, refusal.reason.status, headers, "application/json")


def _refused(request: Request, error: Exception) -> Response:
    if not isinstance(error, Refused):
        raise error
    return _shaped(error.refusal)


def _unknown_path(request: Request, error: Exception) -> Response:
    message = (
        f"There is nothing at {request.url.path!r}. This gateway serves {', '.join(_PATHS)} and /v1/models; "
        "paths match exactly, and the base URL for clients ends in '/v1' (for example http://HOST:8000/v1)."
    )
    return _shaped(Refusal(Reason.UNKNOWN_PATH, message))


def _wrong_method(request: Request, error: Exception) -> Response:
    allowed = (error.headers or {}).get("Allow", "") if isinstance(error, HTTPException) else ""
    response = _shaped(Refusal(Reason.METHOD_NOT_ALLOWED, f"{request.method} is not allowed here; use {allowed}."))
    response.headers["allow"] = allowed
    return response
