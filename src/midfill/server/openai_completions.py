"""POST /v1/completions: raw prompts, and infilling when there is a ``suffix``."""

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from midfill.errors import InvalidRequestError
from midfill.frontend.answer import TokenLogprob
from midfill.frontend.prompts import Prompt, PromptEncoder
from midfill.frontend.sampling import SamplingParams, check_sampling
from midfill.infill.request import InfillRequest, RequestedLayout, WindowMode
from midfill.server.bodies import body_reference, read_json
from midfill.server.event_stream import EventStream, while_connected
from midfill.server.openai_fields import (
    GenerationFields,
    floor_logprob,
    midfill_object,
    usage_object,
)
from midfill.server.service import Generation, ModelService, most_choices

_DEFAULT_MAX_TOKENS = 16


class MidfillFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The request's ``midfill`` object.

    Attributes:
        layout: how to lay the prompt out; "auto" when null.
        document: the client's name for the document, if it has one.
        window: "as-sent" forbids prompts with text of earlier requests beside what was sent now.
    """

    layout: RequestedLayout | None = None
    document: str | None = None
    window: WindowMode | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None
    midfill: MidfillFields | None = None


def routes(service: ModelService, tenant_of: Callable[[Request], Awaitable[str]]) -> APIRouter:
    """The endpoint."""
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=body_reference(CompletionRequest))
    async def completions(request: Request, tenant: Annotated[str, Depends(tenant_of)]) -> Response:
        """Go on from a prompt, or fill in between ``prompt`` and ``suffix``."""
        body = await read_json(request, CompletionRequest, service.max_body_bytes)
        service.check_model(body.model)
        sampling = _sampling(body, service)
        prompts = await service.encode(lambda encoder: _prompts(body, tenant, encoder))
        most_choices(len(prompts), sampling.n)
        answer = _Completion(body, service.generate(prompts, sampling, tenant), service.name)
        if body.stream:
            return EventStream(answer.events())
        whole = await while_connected(request.receive, answer.whole())
        return Response(msgspec.json.encode(whole), media_type="application/json")

    return router


def _sampling(body: CompletionRequest, service: ModelService) -> SamplingParams:
    sampling = body.sampling(default_max_tokens=_DEFAULT_MAX_TOKENS, logprobs=body.logprobs)
    check_sampling(sampling, service.tokenizer.vocab_size)
    body.wants_usage()
    if body.best_of is not None and body.best_of != sampling.n:
        raise InvalidRequestError("best_of is not supported; use n", param="best_of")
    if body.echo and body.logprobs is not None:
        raise InvalidRequestError(
            "logprobs of an echoed prompt are not supported; leave out echo or logprobs",
            param="echo",
        )
    return sampling


def _prompts(body: CompletionRequest, tenant: str, encoder: PromptEncoder) -> list[Prompt]:
    """Encode what ``prompt`` holds: a text, texts, token ids, or lists of token ids."""
    fields = body.midfill or MidfillFields()
    given = body.prompt
    if isinstance(given, list) and given and all(isinstance(item, int) for item in given):
        items: Sequence[object] = [given]
    else:
        items = given if isinstance(given, list) else [given]
    if not items:
        raise InvalidRequestError("prompt is empty", param="prompt")
    most_choices(len(items), 1)
    if len({type(item) for item in items}) > 1 or isinstance(items[0], int):
        raise InvalidRequestError("prompt mixes texts and token ids", param="prompt")
    prompts = []
    for item in items:
        if isinstance(item, list):
            if body.suffix is not None:
                raise InvalidRequestError(
                    "a prompt of token ids can't have a suffix; send text", param="suffix"
                )
            prompts.append(encoder.tokens(item))
            continue
        assert isinstance(item, str)
        request = InfillRequest(
            prefix=item,
            suffix=body.suffix or "",
            raw=body.suffix is None,
            layout=fields.layout or "auto",
            document=fields.document,
            tenant=tenant,
            window=fields.window or "stable",
        )
        prompts.append(encoder.infill(request))
    return prompts


class _Completion:
    """One answer, whole or as a stream of chunks."""

    def __init__(self, body: CompletionRequest, generation: Generation, model: str) -> None:
        self._echo = bool(body.echo)
        self._logprobs = body.logprobs is not None
        self._answers = body.n or 1
        self._usage = body.wants_usage()
        self._generation = generation
        self._head: dict[str, object] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> dict[str, object]:
        """The answer when all of it is there."""
        responses = self._generation.responses
        choices = [
            self._choice(place, index, self._prefix(place))
            for place in range(len(responses))
            for index in range(self._answers)
        ]
        logprobs: list[list[TokenLogprob]] = [[] for _ in choices]
        async for place, delta in self._generation.deltas():
            number = place * self._answers + delta.index
            choice = choices[number]
            choice["text"] += delta.text
            logprobs[number] += delta.logprobs
            choice["finish_reason"] = delta.finish_reason
            choice["stop_reason"] = delta.stop_reason
        for choice, reports in zip(choices, logprobs, strict=True):
            choice["logprobs"] = self._logprobs_object(reports)
        answer = {**self._head, "choices": choices, "usage": usage_object(self._generation.usage)}
        self._add_midfill(answer, choices)
        return answer

    async def events(self) -> AsyncGenerator[dict[str, object], None]:
        """The answer in chunks."""
        started: set[int] = set()
        async for place, delta in self._generation.deltas():
            number = place * self._answers + delta.index
            prefix = "" if number in started else self._prefix(place)
            choice = self._choice(place, delta.index, prefix + delta.text)
            choice["logprobs"] = self._logprobs_object(delta.logprobs)
            choice["finish_reason"] = delta.finish_reason
            choice["stop_reason"] = delta.stop_reason
            chunk: dict[str, object] = {**self._head, "choices": [choice]}
            if number not in started:
                started.add(number)
                self._add_midfill(chunk, [choice])
            if self._usage:
                chunk["usage"] = None
            yield chunk
        if self._usage:
            yield {**self._head, "choices": [], "usage": usage_object(self._generation.usage)}

    def _prefix(self, place: int) -> str:
        return self._generation.responses[place].prompt.text if self._echo else ""

    def _choice(self, place: int, index: int, text: str) -> dict[str, Any]:
        return {
            "index": place * self._answers + index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }

    def _add_midfill(self, answer: dict[str, object], choices: Sequence[dict[str, Any]]) -> None:
        """Tell how prompts were laid out: in the answer, or of several prompts in each choice."""
        responses = self._generation.responses
        targets: list[dict[str, Any]] = list(choices) if len(responses) > 1 else [answer]
        for target in targets:
            response = responses[target.get("index", 0) // self._answers]
            found = midfill_object(response.prompt, response.usage)
            if found is not None:
                target["midfill"] = found

    def _logprobs_object(self, reports: Sequence[TokenLogprob]) -> dict[str, object] | None:
        if not self._logprobs:
            return None
        return {
            "tokens": [report.chosen.text for report in reports],
            "token_logprobs": [floor_logprob(report.chosen.logprob) for report in reports],
            "top_logprobs": [
                {
                    candidate.text: floor_logprob(candidate.logprob)
                    for candidate in (*report.top, report.chosen)
                }
                for report in reports
            ],
            "text_offset": [report.offset for report in reports],
        }
