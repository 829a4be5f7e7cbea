"""GET /health, /readyz, /livez, for load balancers, which need no API key; and GET /metrics."""

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from midfill.serving.server.service import ModelService


def health_routes(service: ModelService) -> APIRouter:
    """Return the router of /health, /readyz and /livez."""
    router = APIRouter()

    @router.get("/livez")
    async def alive() -> Response:
        """Answer 200 as long as the server's process runs, whatever the engine does.

        The server restarts the engine by itself, so nobody need restart the server for that.
        """
        return Response(msgspec.json.encode({"status": "ok"}), media_type="application/json")

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


def metrics_routes(service: ModelService) -> APIRouter:
    """Return the router of /metrics."""
    router = APIRouter()

    @router.get("/metrics")
    async def metrics() -> Response:
        """Answer in Prometheus' text format."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router
