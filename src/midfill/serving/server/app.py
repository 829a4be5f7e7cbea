"""create_app: all dialects around one served model, its health, metrics and description."""

import time
from collections.abc import Collection, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp

from midfill.serving.server.auth import KeyRing, monitor_check, tenant_check
from midfill.serving.server.bodies import body_schemas, json_response
from midfill.serving.server.dialects import (
    llama_cpp,
    llama_cpp_model,
    mistral,
    ollama,
    openai,
    openai_completions,
    tabby,
)
from midfill.serving.server.dialects.dialect import Dialect
from midfill.serving.server.middleware import (
    CancelOnDisconnect,
    EarlyRefusal,
    OwnHosts,
    RequestLog,
)
from midfill.serving.server.pages import routes as pages
from midfill.serving.server.responses import ErrorBody, install_error_handlers
from midfill.serving.server.service import ModelService, Monitored
from midfill.version import __version__

if TYPE_CHECKING:  # needs an extra
    from midfill.serving.server.tracing import RequestTraces

_DESCRIPTION = "/openapi.json"

DIALECTS = (
    openai_completions.DIALECT,
    openai.DIALECT,
    llama_cpp.DIALECT,
    llama_cpp_model.DIALECT,
    ollama.DIALECT,
    mistral.DIALECT,
    tabby.DIALECT,
)


def create_app(
    service: ModelService,
    keys: KeyRing | None = None,
    traces: "RequestTraces | None" = None,
    dialects: Sequence[Dialect] = DIALECTS,
    *,
    redact: bool = False,
    own_hosts: Collection[str] | None = None,
    kv: APIRouter | None = None,
    monitored: Monitored | None = None,
) -> ASGIApp:
    """Return the ASGI application for a model, whose engine the caller starts and ends.

    Args:
        service: the model.
        keys: who may send requests; None lets everyone in.
        traces: where requests' traces go; None makes none.
        dialects: the client APIs that are spoken.
        kv: routes that move KV between servers; None has none.
        redact: leave out of logs and traces what clients choose, see ``LogOptions``.
        own_hosts: if it answers under names of its own machine only, further ones; None answers
            under any, see ``OwnHosts``.
        monitored: whose metrics are shown; None is this model alone.
    """
    keys = keys or KeyRing()
    app = FastAPI(title="midfill", version=__version__, openapi_url=None)
    tenant_of = tenant_check(keys, service.limits)
    monitors_only = [Depends(monitor_check(keys))]
    error_bodies: dict[str, ErrorBody] = {}
    prefixes = {each.prefix: each.error_body for each in dialects if each.prefix is not None}
    for dialect in dialects:
        router = dialect.routes(service, tenant_of)
        for route in router.routes:
            if isinstance(route, APIRoute):
                error_bodies[route.path] = dialect.error_body
        app.include_router(router)
    app.include_router(health_routes(service))
    app.include_router(metrics_routes(monitored or service), dependencies=monitors_only)
    if kv is not None:
        app.include_router(kv)
    app.include_router(pages.routes())
    app.include_router(pages.dashboard_routes(), dependencies=monitors_only)
    bodies = [body for dialect in dialects for body in dialect.bodies]
    app.include_router(description_routes(app, bodies), dependencies=monitors_only)
    install_error_handlers(app, error_bodies, prefixes)
    app.add_middleware(CancelOnDisconnect)

    queued = {path: dialect.error_body for dialect in dialects for path in dialect.queued}
    guarded: ASGIApp = EarlyRefusal(app, service, keys, queued)
    if own_hosts is not None:
        guarded = OwnHosts(guarded, own_hosts)
    return RequestLog(guarded, service.metrics, traces, redact=redact)


def description_routes(app: FastAPI, bodies: Sequence[type[msgspec.Struct]]) -> APIRouter:
    """Return the router of the API's description; there are no pages for it.

    FastAPI's load scripts from elsewhere, into the origin where browsers keep the user's key.

    Args:
        app: whose routes are described.
        bodies: the request bodies that they refer to.
    """
    router = APIRouter(include_in_schema=False)

    @cache  # once all routes are there
    def describe() -> dict[str, Any]:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schema.setdefault("components", {})["schemas"] = body_schemas(bodies)
        return schema

    @router.get(_DESCRIPTION)
    async def openapi() -> JSONResponse:
        return JSONResponse(describe())

    return router


def health_routes(service: ModelService) -> APIRouter:
    """Return the router of /health, /readyz and /livez."""
    router = APIRouter()

    @router.get("/livez")
    async def alive() -> Response:
        """Answer 200 as long as the server's process runs, whatever the engine does.

        The server restarts the engine by itself, so nobody need restart the server for that.
        """
        return json_response({"status": "ok"})

    @router.get("/readyz")
    @router.get("/health")
    async def health() -> Response:
        """Answer 200 while requests are accepted and 503 otherwise, with the engine's state."""
        engine = service.engine
        ready = engine.state == "ready"
        return Response(
            msgspec.json.encode({"status": "ok" if ready else engine.state}),
            status_code=200 if ready else 503,
            headers={} if ready else {"retry-after": str(engine.retry_after)},
            media_type="application/json",
        )

    return router


def metrics_routes(service: Monitored) -> APIRouter:
    """Return the router of /metrics, and of their history for the dashboard."""
    router = APIRouter()

    @router.get("/metrics")
    async def metrics() -> Response:
        """Answer in Prometheus' text format."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/metrics/history", include_in_schema=False)
    async def history() -> Response:
        """Answer what the dashboard begins with; its form is the dashboard's own."""
        return json_response(service.history.body(time.monotonic()))

    return router
