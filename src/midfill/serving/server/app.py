"""create_app: all dialects around one served model."""

from collections.abc import Collection, Sequence

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.types import ASGIApp

from midfill.serving.server import api_docs, operations
from midfill.serving.server.auth import find_tenant, monitor_check, tenant_check
from midfill.serving.server.dialects import (
    deepseek,
    llama_cpp,
    llama_cpp_model,
    mistral,
    ollama,
    ollama_models,
    openai_chat,
    openai_completions,
    openai_models,
    tabby,
)
from midfill.serving.server.dialects.dialect import Dialect
from midfill.serving.server.disconnects import CancelOnDisconnect
from midfill.serving.server.early_refusal import EarlyRefusal
from midfill.serving.server.errors import ErrorBody, install_error_handlers
from midfill.serving.server.key_ring import KeyRing
from midfill.serving.server.own_hosts import OwnHosts
from midfill.serving.server.pages import routes as pages
from midfill.serving.server.request_log import RequestLog, Traces
from midfill.serving.server.service import ModelService
from midfill.version import __version__

DIALECTS = (
    openai_completions.DIALECT,
    openai_chat.DIALECT,
    openai_models.DIALECT,
    llama_cpp.DIALECT,
    llama_cpp_model.DIALECT,
    ollama.DIALECT,
    ollama_models.DIALECT,
    mistral.DIALECT,
    deepseek.DIALECT,
    tabby.DIALECT,
)


def create_app(
    service: ModelService,
    keys: KeyRing | None = None,
    traces: Traces | None = None,
    dialects: Sequence[Dialect] = DIALECTS,
    *,
    redact: bool = False,
    own_hosts: Collection[str] | None = None,
    kv: APIRouter | None = None,
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
    """
    keys = keys or KeyRing()
    app = FastAPI(title="midfill", version=__version__, openapi_url=None)
    tenant_of = tenant_check(keys, service.limits)
    monitors_only = [Depends(monitor_check(keys))]
    error_bodies: dict[str, ErrorBody] = {}
    for dialect in dialects:
        router = dialect.routes(service, tenant_of)
        for route in router.routes:
            if isinstance(route, APIRoute):
                error_bodies[route.path] = dialect.error_body
        app.include_router(router)
    app.include_router(operations.health_routes(service))
    app.include_router(operations.metrics_routes(service), dependencies=monitors_only)
    if kv is not None:
        app.include_router(kv)
    app.include_router(pages.routes())
    app.include_router(pages.dashboard_routes(), dependencies=monitors_only)
    bodies = [body for dialect in dialects for body in dialect.bodies]
    app.include_router(api_docs.routes(app, bodies), dependencies=monitors_only)
    install_error_handlers(app, error_bodies)
    app.add_middleware(CancelOnDisconnect)

    def check_queue(request: Request) -> None:
        find_tenant(request, keys)
        service.check_queue()

    queued = {path: dialect.error_body for dialect in dialects for path in dialect.queued}
    guarded: ASGIApp = EarlyRefusal(app, check_queue, queued)
    if own_hosts is not None:
        guarded = OwnHosts(guarded, own_hosts)
    return RequestLog(guarded, service.metrics, traces, redact=redact)
