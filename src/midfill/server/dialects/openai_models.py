"""GET /v1/models: what is served."""

from fastapi import APIRouter, Depends

from midfill.server.dialects.dialect import Dialect, TenantOf
from midfill.server.service import ModelService


def routes(service: ModelService, tenant_of: TenantOf) -> APIRouter:
    """Return the router of the list and of its one entry."""
    router = APIRouter(dependencies=[Depends(tenant_of)])

    def card() -> dict[str, object]:
        return {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "midfill",
            "max_model_len": service.context,  # vLLM's name for it
            "midfill": {"sentinels": service.fim_format is not None},
        }

    @router.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [card()]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, object]:
        service.check_model(name)
        return card()

    return router


DIALECT = Dialect(routes=routes)
