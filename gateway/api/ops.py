"""The ops port's application: metrics for Prometheus, live state for operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from fastapi import FastAPI, Request, Response

from gateway.api.auth import key_hash, presented_key
from gateway.api.errors import error_body
from gateway.core.refusal import Reason
from gateway.core.views import Snapshot

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def ops_app(
    metrics: Callable[[], bytes],
    snapshot: Callable[[], Snapshot],
    admin: frozenset[str],
) -> FastAPI:
    """The application of the ops port; `/admin/*` needs one of the `admin` key hashes, also on loopback."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)

    def is_admin(request: Request) -> bool:
        headers = {name.encode("latin-1"): value.encode("latin-1") for name, value in request.headers.items()}
        key = presented_key(headers)
        return key is not None and key_hash(key) in admin

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics(), media_type=METRICS_TYPE)

    @app.get("/livez")
    async def alive() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/admin/state", response_model=None)
    async def state(request: Request) -> dict[str, object] | Response:
        if not is_admin(request):
            body = error_body(Reason.UNAUTHENTICATED, "This needs an admin key: 'Authorization: Bearer ADMIN-KEY'.")
            return Response(body, 401, media_type="application/json")
        now = snapshot()
        return asdict(now) | {"tenants": {each.name: asdict(each) for each in now.tenants}}

    return app
