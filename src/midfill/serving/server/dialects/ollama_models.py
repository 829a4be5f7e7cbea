"""What Ollama tells of its models: GET /api/tags, /api/ps and /api/version, POST /api/show.

Clients decide by the last whether to send a ``suffix``: Continue if ``template`` uses ``.Suffix``,
others if ``insert`` is among the capabilities.
"""

import hashlib
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from midfill.infill.formats import FimFormat
from midfill.serving.server.bodies import body_reference, json_response, read_json
from midfill.serving.server.dialects.dialect import Dialect, TenantOf
from midfill.serving.server.dialects.ollama_fields import (
    check_name,
    error_body,
    timestamp,
    with_tag,
)
from midfill.serving.server.service import ModelService
from midfill.version import __version__

# Of the API that is spoken here; clients refuse to talk to versions that are too old for them.
_API_VERSION = "0.13.0"


class ShowBody(msgspec.Struct, kw_only=True):
    """The body of POST /api/show; ``name`` is the older spelling of ``model``."""

    model: str | None = None
    name: str | None = None


def routes(service: ModelService, tenant_of: TenantOf) -> APIRouter:
    """Return the router of the endpoints."""
    router = APIRouter(dependencies=[Depends(tenant_of)])

    @router.get("/api/version")
    @router.head("/api/version", include_in_schema=False)
    async def version() -> Response:
        """Tell the version of the API."""
        return json_response({"version": f"{_API_VERSION}+midfill.{__version__}"})

    @router.get("/api/tags")
    @router.head("/api/tags", include_in_schema=False)
    async def tags() -> Response:
        """List the model by each of its names."""
        return json_response({"models": [_card(service, name) for name in service.names]})

    @router.get("/api/ps")
    async def running() -> Response:
        """List the loaded models: the one that is served."""
        card = _card(service, service.name)
        loaded = {"size_vram": 0, "context_length": service.context}
        return json_response({"models": [{**card, **loaded, "expires_at": "9999-12-31T23:59:59Z"}]})

    @router.post("/api/show", openapi_extra=body_reference(ShowBody))
    async def show(request: Request) -> Response:
        """Describe the model."""
        body = await read_json(request, ShowBody, service.max_body_bytes, any_content_type=True)
        check_name(service, body.model or body.name or "")
        infills = service.fim_format is not None
        return json_response(
            {
                "modelfile": "",
                "parameters": f"num_ctx {service.context}",
                "template": _template(service.fim_format),
                "details": _details(),
                "model_info": {
                    "general.architecture": "midfill",
                    "midfill.context_length": service.context,
                },
                "capabilities": ["completion", "insert"] if infills else ["completion"],
                "modified_at": timestamp(service.created),
            }
        )

    return router


def _card(service: ModelService, name: str) -> dict[str, Any]:
    info = service.engine.info
    return {
        "name": with_tag(name),
        "model": with_tag(name),
        "modified_at": timestamp(service.created),
        "size": 0 if info is None else info.weight_bytes,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(),
    }


def _details() -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf",
        "family": "midfill",
        "families": ["midfill"],
        "parameter_size": "",
        "quantization_level": "",
    }


def _template(format: FimFormat | None) -> str:
    """Return the model's FIM format as Ollama's templates spell it."""
    if format is None:
        return "{{ .Prompt }}"
    prefix, suffix = (
        f"{format.prefix.text}{{{{ .Prompt }}}}",
        f"{format.suffix.text}{{{{ .Suffix }}}}",
    )
    middle = "" if format.middle is None else format.middle.text
    ordered = suffix + prefix if format.order == "spm" else prefix + suffix
    return f"{{{{- if .Suffix }}}}{ordered}{middle}{{{{- else }}}}{{{{ .Prompt }}}}{{{{- end }}}}"


DIALECT = Dialect(routes=routes, bodies=(ShowBody,), error_body=error_body)
