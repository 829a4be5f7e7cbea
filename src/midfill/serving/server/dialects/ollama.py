"""Ollama's POST /api/generate and POST /api/chat.

A ``suffix`` that is not empty makes an infill request of /api/generate. Without one, and without
``raw``, the prompt is what a user says in a chat; only a prompt that is the model's own FIM
template, filled in, is sent as such: editor plugins send these.
"""

from collections.abc import AsyncGenerator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from midfill.errors import InvalidRequestError
from midfill.frontend.answer import AnswerDelta
from midfill.frontend.generation import GeneratedAnswer
from midfill.frontend.prompt import Prompt
from midfill.frontend.prompts import Admit, PromptEncoder
from midfill.infill.request import InfillRequest
from midfill.serving.server.bodies import body_reference, json_response, read_json
from midfill.serving.server.dialects.dialect import Dialect, TenantOf
from midfill.serving.server.dialects.ollama_fields import (
    OllamaFields,
    Options,
    check_name,
    error_body,
    logprob_object,
    metrics,
    timestamp,
)
from midfill.serving.server.event_stream import JsonLines
from midfill.serving.server.generation import Generation, limited_to_a_hole
from midfill.serving.server.service import ModelService


class GenerateBody(OllamaFields, kw_only=True):
    """The body of POST /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    raw: bool | None = None
    system: str | None = None
    template: str | None = None  # refused

    @property
    def only_loads(self) -> bool:
        """Whether there is nothing to answer: the request is to load the model."""
        return not (self.prompt or self.suffix)

    def text(self, text: str) -> dict[str, object]:
        """Return the field that holds an answer's text."""
        return {"response": text}

    def encode(self, encoder: PromptEncoder, admit: Admit | None, tenant: str) -> Prompt:
        """Return the prompt."""
        if self.template:
            raise InvalidRequestError("template is not supported", param="template")
        request = InfillRequest(
            prefix=self.prompt or "",
            suffix=self.suffix or "",
            raw=not self.suffix,
            tenant=tenant,
        )
        prompt = encoder.infill(request, admit=admit)
        is_verbatim = prompt.report is not None and prompt.report.layout == "verbatim"
        if self.raw or not is_verbatim or not encoder.has_chat_template:
            return prompt
        system = [{"role": "system", "content": self.system}] if self.system else []
        return encoder.chat([*system, {"role": "user", "content": request.prefix}])


class ChatTurn(msgspec.Struct, kw_only=True):
    """A message of a chat."""

    role: str
    content: str | None = None


class ChatBody(OllamaFields, kw_only=True):
    """The body of POST /api/chat."""

    messages: list[ChatTurn] | None = None
    tools: list[Any] | None = None  # refused

    @property
    def only_loads(self) -> bool:
        """Whether there is nothing to answer: the request is to load the model."""
        return not self.messages

    def text(self, text: str) -> dict[str, object]:
        """Return the field that holds an answer's text."""
        return {"message": {"role": "assistant", "content": text}}

    def encode(self, encoder: PromptEncoder, admit: Admit | None, tenant: str) -> Prompt:
        """Return the prompt."""
        if self.tools:
            raise InvalidRequestError("tools are not supported", param="tools")
        turns = self.messages or []
        return encoder.chat(
            [{"role": turn.role.lower(), "content": turn.content or ""} for turn in turns]
        )


def routes(service: ModelService, tenant_of: TenantOf) -> APIRouter:
    """Return the router of the endpoints."""
    router = APIRouter()
    limit = service.max_body_bytes

    @router.post("/api/generate", openapi_extra=body_reference(GenerateBody))
    async def generate(request: Request, tenant: Annotated[str, Depends(tenant_of)]) -> Response:
        """Continue a prompt, fill in before ``suffix``, or answer a user."""
        body = await read_json(request, GenerateBody, limit, any_content_type=True)
        return await _answer(request, body, tenant)

    @router.post("/api/chat", openapi_extra=body_reference(ChatBody))
    async def chat(request: Request, tenant: Annotated[str, Depends(tenant_of)]) -> Response:
        """Generate the assistant's next message."""
        body = await read_json(request, ChatBody, limit, any_content_type=True)
        return await _answer(request, body, tenant)

    async def _answer(request: Request, body: GenerateBody | ChatBody, tenant: str) -> Response:
        check_name(service, body.model)
        sampling = body.sampling(service)
        if body.only_loads:
            reason = "unload" if body.unloads else "load"
            return json_response(_message(body, "") | {"done": True, "done_reason": reason})
        prompt = await service.encode_request(body.encode, tenant)
        if prompt.infilling and (body.options or Options()).num_predict is None:
            sampling = limited_to_a_hole(sampling)
        streamed = body.stream is not False
        generation = service.generate([prompt], sampling, tenant, streamed=streamed)
        if streamed:
            return JsonLines(_lines(body, generation), error_body)
        return json_response(await _whole(body, generation))

    return router


async def _lines(
    body: GenerateBody | ChatBody, generation: Generation
) -> AsyncGenerator[object, None]:
    """Yield the answer in pieces; the last one has no text."""
    async for _, delta in generation.deltas():
        if delta.text or delta.logprobs:
            piece = _message(body, delta.text) | {"done": False}
            yield piece | _logprobs(delta)
        if delta.finish_reason is not None:
            yield _message(body, "") | _end(delta.finish_reason, generation)


async def _whole(body: GenerateBody | ChatBody, generation: Generation) -> dict[str, object]:
    """Return the whole answer."""
    (result,) = await generation.whole()
    (answer,) = result.answers
    return _message(body, answer.text) | _end(answer.finish_reason, generation) | _logprobs(answer)


def _message(body: GenerateBody | ChatBody, text: str) -> dict[str, object]:
    return {"model": body.model, "created_at": timestamp(), **body.text(text)}


def _end(finish_reason: str, generation: Generation) -> dict[str, object]:
    """Return the fields of a response that is complete."""
    cost = metrics(generation.usage, generation.timings)
    return {"done": True, "done_reason": finish_reason, **cost}


def _logprobs(answer: AnswerDelta | GeneratedAnswer) -> dict[str, object]:
    return {"logprobs": [logprob_object(one) for one in answer.logprobs]} if answer.logprobs else {}


DIALECT = Dialect(
    routes=routes,
    bodies=(GenerateBody, ChatBody),
    error_body=error_body,
    queued=("/api/generate", "/api/chat"),
)
