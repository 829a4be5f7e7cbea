"""Mistral's POST /v1/fim/completions, which Codestral's clients use."""

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from midfill.frontend.prompt import PromptSource
from midfill.frontend.sampling import SamplingParams, check_sampling
from midfill.infill.request import InfillRequest
from midfill.serving.server.bodies import body_reference, json_response, read_json
from midfill.serving.server.dialects.dialect import Dialect, TenantOf
from midfill.serving.server.dialects.openai import usage_object
from midfill.serving.server.request import (
    HOLE_TEMPERATURE,
    Generation,
    GenerationRequest,
    limited_to_a_hole,
)
from midfill.serving.server.responses import ApiError, EventStream, openai_error_body
from midfill.serving.server.service import ModelService


class FimBody(msgspec.Struct, kw_only=True):
    """The body of POST /v1/fim/completions; null always means the default."""

    model: str
    prompt: str
    suffix: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    random_seed: int | None = None
    stop: str | list[str] | None = None

    def sampling(self, service: ModelService) -> SamplingParams:
        """Return the sampling parameters, checked."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        sampling = SamplingParams(
            temperature=HOLE_TEMPERATURE if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.random_seed,
            stop=tuple(stop),
        )
        if self.max_tokens is None:
            sampling = limited_to_a_hole(sampling)
        else:
            sampling = msgspec.structs.replace(sampling, max_tokens=self.max_tokens)
        check_sampling(sampling, service.tokenizer.vocab_size, {"seed": "random_seed"})
        return sampling

    def source(self, tenant: str) -> PromptSource:
        """Return what the prompt is made of."""
        return PromptSource(
            text=InfillRequest(prefix=self.prompt, suffix=self.suffix or "", tenant=tenant)
        )


def routes(service: ModelService, tenant_of: TenantOf) -> APIRouter:
    """Return the router of the endpoint."""
    router = APIRouter()

    @router.post("/v1/fim/completions", openapi_extra=body_reference(FimBody))
    async def fim(request: Request, tenant: Annotated[str, Depends(tenant_of)]) -> Response:
        """Fill in between ``prompt`` and ``suffix``."""
        body = await read_json(request, FimBody, service.max_body_bytes)
        model = service.check_model(body.model)
        sampling = service.for_editor(body.sampling(service))
        prompts = await service.encode([body.source(tenant)])
        generation = service.generate(
            GenerationRequest(prompts, sampling, tenant, bool(body.stream))
        )
        head = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": model}
        if body.stream:
            return EventStream(_chunks(head, generation), error_body)
        return json_response(await _whole(head, generation))

    return router


async def _whole(head: dict[str, Any], generation: Generation) -> dict[str, Any]:
    """Return the whole answer, which is a chat's message."""
    (result,) = await generation.whole()
    (answer,) = result.answers
    message = {"role": "assistant", "content": answer.text, "tool_calls": None, "prefix": False}
    choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason}
    usage = usage_object(generation.usage)
    return {**head, "object": "chat.completion", "choices": [choice], "usage": usage}


async def _chunks(
    head: dict[str, Any], generation: Generation
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the answer in chunks; the last one holds the usage."""
    role = {"role": "assistant"}
    async for _, delta in generation.deltas():
        choice = {
            "index": 0,
            "delta": {**role, "content": delta.text},
            "finish_reason": delta.finish_reason,
        }
        role = {}
        chunk = {**head, "object": "chat.completion.chunk", "choices": [choice]}
        if delta.finish_reason is not None:
            chunk["usage"] = usage_object(generation.usage)
        yield chunk


def error_body(error: ApiError) -> dict[str, object]:
    """Return Mistral's shape of an error: OpenAI's fields, without an object around them."""
    fields = openai_error_body(error)["error"]
    assert isinstance(fields, dict)
    return {"object": "error", **fields}


DIALECT = Dialect(
    routes=routes, bodies=(FimBody,), error_body=error_body, queued=("/v1/fim/completions",)
)
