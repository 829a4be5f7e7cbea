"""create_app: all dialects around one served model."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from midfill.server import openai_chat, openai_completions, openai_models, operations
from midfill.server.auth import tenant_check
from midfill.server.bodies import body_schemas
from midfill.server.errors import install_error_handlers
from midfill.server.service import ModelService
from midfill.version import __version__

_DIALECTS = (openai_completions, openai_chat, openai_models)
_BODIES = (openai_completions.CompletionRequest, openai_chat.ChatRequest)


def create_app(service: ModelService, api_keys: tuple[str, ...] = ()) -> FastAPI:
    """Return the ASGI application for a model, whose engine the caller starts and ends."""
    app = FastAPI(title="midfill", version=__version__)
    tenant_of = tenant_check(api_keys)
    for dialect in _DIALECTS:
        app.include_router(dialect.routes(service, tenant_of))
    app.include_router(operations.routes(service))
    install_error_handlers(app)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schema.setdefault("components", {})["schemas"] = body_schemas(_BODIES)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    return app
