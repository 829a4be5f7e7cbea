"""llama.cpp's POST /infill and POST /completion, as llama.vim and llama.vscode use them.

``n_predict`` 0 answers at once, and the prompt is computed while the engine is idle. Plugins send
this without any text when their ring of snippets has changed. The next request will then show the
new snippets with the document that was edited last, so this is what is computed.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from midfill.errors import InvalidRequestError
from midfill.frontend.prompt import Prompt
from midfill.frontend.prompts import Admit, PromptEncoder
from midfill.frontend.sampling import SamplingParams
from midfill.infill.context_files import ContextFile
from midfill.infill.request import InfillRequest
from midfill.serving.server.bodies import body_reference, json_response, read_json
from midfill.serving.server.dialects.dialect import Dialect, TenantOf
from midfill.serving.server.dialects.llama_cpp_fields import LlamaCppFields, error_body
from midfill.serving.server.dialects.llama_cpp_results import Results
from midfill.serving.server.event_stream import ServerSentEvents
from midfill.serving.server.generation import check_answer_count, limited_to_a_hole
from midfill.serving.server.service import ModelService

_MAX_SNIPPETS = 256  # the last ones count
_NAMES = {"prompt": "input_prefix", "suffix": "input_suffix", "context": "input_extra"}


class ExtraSnippet(msgspec.Struct, kw_only=True):
    """An entry of ``input_extra``: a file, or a part of one."""

    text: str
    filename: str | None = None


class InfillBody(LlamaCppFields, kw_only=True):
    """The body of POST /infill. ``prompt`` is the caret's line up to the caret."""

    input_prefix: str
    input_suffix: str
    prompt: str | None = None
    input_extra: list[ExtraSnippet] | None = None

    @property
    def announces_context(self) -> bool:
        """Whether it asks for nothing, and only tells which snippets will be sent next."""
        return self.limit == 0 and not (self.input_prefix or self.prompt or self.input_suffix)

    def request(self, tenant: str) -> InfillRequest:
        """Return the request. Snippets that don't fit are left out, the oldest first."""
        extra = (self.input_extra or [])[-_MAX_SNIPPETS:]
        return InfillRequest(
            prefix=self.input_prefix + (self.prompt or ""),
            suffix=self.input_suffix,
            tenant=tenant,
            context=tuple(ContextFile(one.text, one.filename or "") for one in extra),
            snippets=True,
        )

    def encode(self, encoder: PromptEncoder, admit: Admit | None, tenant: str) -> Prompt:
        """Return the prompt."""
        try:
            return encoder.infill(self.request(tenant), admit=admit)
        except InvalidRequestError as error:
            raise error.renamed(_NAMES) from None


class CompletionBody(LlamaCppFields, kw_only=True):
    """The body of POST /completion: a raw prompt, in which special tokens are parsed, or several.

    A list of numbers is one prompt.
    """

    prompt: str | list[str | int | list[int]]

    def encode(self, encoder: PromptEncoder, admit: Admit | None, tenant: str) -> list[Prompt]:
        """Return the prompts."""
        given = self.prompt
        if not given:
            raise InvalidRequestError("prompt is empty", param="prompt")
        if isinstance(given, str):
            given = [given]
        numbers = [item for item in given if isinstance(item, int)]
        if numbers and len(numbers) < len(given):
            raise InvalidRequestError("prompt mixes texts and token ids", param="prompt")
        items = [numbers] if numbers else given
        check_answer_count(len(items), 1)
        return [
            encoder.infill(InfillRequest(prefix=item, raw=True, tenant=tenant), admit=admit)
            if isinstance(item, str)
            else encoder.tokens(item)
            for item in items
            if not isinstance(item, int)
        ]


def routes(service: ModelService, tenant_of: TenantOf) -> APIRouter:
    """Return the router of the endpoints."""
    router = APIRouter()
    limit = service.max_body_bytes

    @router.post("/infill", openapi_extra=body_reference(InfillBody))
    async def infill(request: Request, tenant: Annotated[str, Depends(tenant_of)]) -> Response:
        """Fill in between ``input_prefix + prompt`` and ``input_suffix``."""
        body = await read_json(request, InfillBody, limit, any_content_type=True)
        sampling = body.sampling(service)
        if body.n_predict is None and body.max_tokens is None:
            sampling = limited_to_a_hole(sampling)
        if body.announces_context:
            service.prefill_context(body.request(tenant))
            return json_response(Results(body, sampling, service).of_prefill([Prompt([], "")]))
        prompt = await service.encode_request(body.encode, tenant)
        return await _answer(request, body, [prompt], sampling, tenant)

    @router.post("/completion", openapi_extra=body_reference(CompletionBody))
    @router.post("/completions", openapi_extra=body_reference(CompletionBody))
    async def completion(request: Request, tenant: Annotated[str, Depends(tenant_of)]) -> Response:
        """Continue raw prompts."""
        body = await read_json(request, CompletionBody, limit, any_content_type=True)
        sampling = body.sampling(service)
        prompts = await service.encode_request(body.encode, tenant)
        return await _answer(request, body, prompts, sampling, tenant)

    async def _answer(
        request: Request,
        body: LlamaCppFields,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        tenant: str,
    ) -> Response:
        check_answer_count(len(prompts), sampling.n)
        results = Results(body, sampling, service)
        if body.limit == 0:
            for prompt in prompts:
                service.prefill(prompt, tenant)
            return json_response(results.of_prefill(prompts))
        generation = service.generate(prompts, sampling, tenant, streamed=bool(body.stream))
        if body.stream:
            return ServerSentEvents(results.events(generation), error_body)
        return json_response(await results.whole(generation))

    return router


DIALECT = Dialect(
    routes=routes,
    bodies=(InfillBody, CompletionBody),
    error_body=error_body,
    queued=("/infill", "/completion", "/completions"),
)
