"""GET /openapi.json, /docs and /redoc: the API described, behind a key where the API is."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse

from midfill.serving.server.bodies import body_schemas

_DESCRIPTION = "/openapi.json"


def routes(app: FastAPI, bodies: Sequence[type[msgspec.Struct]]) -> APIRouter:
    """Return the router.

    Args:
        app: whose routes are described.
        bodies: the request bodies that they refer to.
    """
    router = APIRouter(include_in_schema=False)
    describe = _described_once(app, bodies)

    @router.get(_DESCRIPTION)
    async def openapi() -> JSONResponse:
        return JSONResponse(describe())

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(openapi_url=_DESCRIPTION, title=app.title)

    @router.get("/redoc")
    async def redoc() -> HTMLResponse:
        return get_redoc_html(openapi_url=_DESCRIPTION, title=app.title)

    return router


def _described_once(
    app: FastAPI, bodies: Sequence[type[msgspec.Struct]]
) -> Callable[[], dict[str, Any]]:
    schema: dict[str, Any] = {}

    def describe() -> dict[str, Any]:
        if not schema:
            schema.update(get_openapi(title=app.title, version=app.version, routes=app.routes))
            schema.setdefault("components", {})["schemas"] = body_schemas(bodies)
        return schema

    return describe
