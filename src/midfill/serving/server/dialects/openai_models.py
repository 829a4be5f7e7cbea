"""GET /v1/models: what is served."""

from fastapi import APIRouter, Depends

from midfill.serving.server.dialects.dialect import Dialect, TenantOf
from midfill.serving.server.service import ModelService


def routes(service: ModelService, tenant_of: TenantOf) -> APIRouter:
    """Return the router of the list and of its entries: one per name of the model."""
    router = APIRouter(dependencies=[Depends(tenant_of)])

    format = service.fim_format
    sentinels: dict[str, object] = {"sentinels": format is not None}
    if format is not None and format.order == "psm" and format.middle is not None:
        parts = (format.prefix, format.suffix, format.middle)
        sentinels["fim_tokens"] = [part.text for part in parts]

    def card(name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "midfill",
            "root": service.name,  # vLLM's names for the model itself, and for its context
            "max_model_len": service.context,
            "midfill": sentinels,
        }

    @router.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [card(name) for name in service.names]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, object]:
        return card(service.check_model(name))

    return router


DIALECT = Dialect(routes=routes)
