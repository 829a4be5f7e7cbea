"""GET /health and GET /metrics, for load balancers and dashboards; neither needs an API key."""

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from midfill.server.service import ModelService


def routes(service: ModelService) -> APIRouter:
    """Return the router of both endpoints."""
    router = APIRouter()

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

    @router.get("/metrics")
    async def metrics() -> Response:
        """Answer in Prometheus' text format."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router
