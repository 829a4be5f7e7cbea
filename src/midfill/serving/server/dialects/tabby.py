"""Tabby's completions, health, settings and events, as its agent asks for them.

Tabby and OpenAI use the same path, POST /v1/completions. A body with ``segments`` is Tabby's; what
it gets is here. Its other paths are its own.

Of the snippets that the agent finds for each request, as many are shown as Tabby itself would show.
They change often, and what changes before the document costs its whole prompt.
"""

import os
import platform
import uuid
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from midfill.errors import InvalidRequestError
from midfill.frontend.prompt import PromptSource
from midfill.frontend.sampling import PostProcessing, SamplingParams, check_sampling
from midfill.infill.context_files import ContextFile
from midfill.infill.request import InfillRequest
from midfill.serving.server.bodies import body_reference, json_response, read_json
from midfill.serving.server.dialects.dialect import Dialect, TenantOf
from midfill.serving.server.request import GenerationRequest
from midfill.serving.server.service import ModelService
from midfill.version import __version__

_MAX_SNIPPETS = 256  # of a kind
_MAX_SNIPPET_CHARACTERS = 768  # of all snippets together, as in Tabby's server
_MAX_TOKENS = 64  # Tabby's default
# Of the API that is spoken here; the agent asks older servers for less.
_API_VERSION = "v0.30.0"


class Snippet(msgspec.Struct, kw_only=True):
    """A declaration, or a part of another file."""

    filepath: str
    body: str


class Segments(msgspec.Struct, kw_only=True):
    """The text around the caret, and what the agent found that may help.

    The clipboard is ignored, as by Tabby.
    """

    prefix: str
    suffix: str | None = None
    filepath: str | None = None
    git_url: str | None = None
    declarations: list[Snippet] | None = None
    relevant_snippets_from_changed_files: list[Snippet] | None = None
    relevant_snippets_from_recently_opened_files: list[Snippet] | None = None

    def snippets(self) -> Iterator[ContextFile]:
        """Yield the first snippets of each kind, as long as they are not too many together."""
        left = _MAX_SNIPPET_CHARACTERS
        for kind in (
            self.declarations,
            self.relevant_snippets_from_changed_files,
            self.relevant_snippets_from_recently_opened_files,
        ):
            for snippet in (kind or ())[:_MAX_SNIPPETS]:
                if len(snippet.body) > left:
                    break
                left -= len(snippet.body)
                yield ContextFile(snippet.body, snippet.filepath)

    def source(self, service: ModelService, tenant: str) -> PromptSource:
        """Return what the prompt is made of.

        The model sees the file's path if its family has a token for files.
        """
        format = service.fim_format
        shown = format is not None and format.file_separator is not None
        request = InfillRequest(
            prefix=self.prefix,
            suffix=self.suffix or "",
            tenant=tenant,
            document=self.filepath,
            context_files=tuple(self.snippets()),
            snippets=True,
            path=(self.filepath or "") if shown else "",
            repository=_repository_name(self.git_url or "") if shown else "",
        )
        return PromptSource(text=request)


class Event(msgspec.Struct, kw_only=True):
    """The body of POST /v1/events: what became of a completion."""

    type: Literal["view", "select", "dismiss"]
    completion_id: str
    choice_index: int


async def complete_segments(
    service: ModelService,
    tenant: str,
    segments: Segments,
    *,
    mode: str | None = None,
    temperature: float | None = None,
    seed: int | None = None,
) -> Response:
    """Answer a request for a completion.

    Raises:
        InvalidRequestError: what is asked for is no completion, or a field is out of range.
    """
    if mode not in (None, "standard"):
        raise InvalidRequestError(f"mode {mode!r} is not supported", param="mode")
    sampling = SamplingParams(
        max_tokens=_MAX_TOKENS,
        temperature=temperature or 0.0,
        seed=seed,
        post_processing=PostProcessing(lines="block"),
    )
    check_sampling(sampling, service.tokenizer.vocab_size)
    prompts = await service.encode([segments.source(service, tenant)])
    sampling = service.for_editor(sampling)
    generation = service.generate(GenerationRequest(prompts, sampling, tenant))
    (result,) = await generation.whole()
    choices = [{"index": 0, "text": result.text}]
    return json_response({"id": f"cmpl-{uuid.uuid4()}", "choices": choices, "mode": "standard"})


def routes(service: ModelService, tenant_of: TenantOf) -> APIRouter:
    """Return the router of Tabby's other endpoints."""
    router = APIRouter(dependencies=[Depends(tenant_of)])

    @router.get("/v1/health")
    @router.post("/v1/health")
    async def health() -> Response:
        """Describe the server."""
        return json_response(_health(service))

    @router.get("/v1beta/server_setting")
    async def server_setting() -> dict[str, bool]:
        """Tell clients to send nothing about their use to anybody."""
        return {"disable_client_side_telemetry": True}

    @router.post("/v1/events", openapi_extra=body_reference(Event))
    async def events(request: Request) -> Response:
        """Accept what became of a completion; it is not kept."""
        await read_json(request, Event, service.max_body_bytes)
        return Response()

    return router


def _health(service: ModelService) -> dict[str, Any]:
    model = {"local": {"model_id": service.name, "device": "cpu"}}
    return {
        "status": "ok" if service.engine.state == "ready" else service.engine.state,  # llama.cpp's
        "model": service.name,
        "chat_model": service.name,
        "device": "cpu",
        "cuda_devices": [],
        "models": {"completion": model, "chat": model},
        "arch": platform.machine(),
        "cpu_info": platform.processor(),
        "cpu_count": os.cpu_count() or 1,
        "version": {
            "build_date": "",
            "build_timestamp": "",
            "git_sha": f"midfill {__version__}",
            "git_describe": _API_VERSION,
        },
    }


def _repository_name(git_url: str) -> str:
    return git_url.rstrip("/").removesuffix(".git").replace(":", "/").rpartition("/")[2]


DIALECT = Dialect(routes=routes, bodies=(Event,))
