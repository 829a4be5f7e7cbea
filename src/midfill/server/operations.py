"""GET /health and GET /metrics: for load balancers and dashboards, open to all."""

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from midfill.server.service import ModelService


def routes(service: ModelService) -> APIRouter:
    """The endpoints."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """200 while requests are taken, else 503; the body says which state the engine is in."""
        state = service.engine.state
        return Response(
            msgspec.json.encode({"status": "ok" if state == "ready" else state}),
            status_code=200 if state == "ready" else 503,
            media_type="application/json",
        )

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router
