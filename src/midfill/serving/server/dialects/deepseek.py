"""DeepSeek's FIM endpoint: OpenAI's completions at the paths of its beta API."""

from fastapi import APIRouter
from fastapi.routing import APIRoute

from midfill.serving.server.dialects import openai_completions
from midfill.serving.server.dialects.dialect import Dialect, TenantOf
from midfill.serving.server.service import ModelService

_PATHS = ("/beta/completions", "/beta/v1/completions")


def routes(service: ModelService, tenant_of: TenantOf) -> APIRouter:
    """Return the router of the paths."""
    router = APIRouter()
    for route in openai_completions.routes(service, tenant_of).routes:
        assert isinstance(route, APIRoute)
        for path in _PATHS:
            router.add_api_route(
                path, route.endpoint, methods=["POST"], openapi_extra=route.openapi_extra
            )
    return router


DIALECT = Dialect(routes=routes, queued=_PATHS)
