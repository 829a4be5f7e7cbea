"""llama.cpp's POST /infill and POST /completion, as llama.vim and llama.vscode use them.

``n_predict`` 0 answers at once, and the prompt is computed while the engine is idle. Plugins send
this without any text when their ring of snippets has changed. The next request will then show the
new snippets with the document that was edited last, so this is what is computed.

Names, defaults and meanings are those of its server (tools/server). Ignored are unknown fields,
``id_slot``, ``cache_prompt``, ``t_max_prompt_ms`` and samplers that midfill lacks: mirostat, DRY,
XTC, top-n-sigma, dynamic temperature, and ``repeat_penalty``, which there looks at the last 64
tokens only. Grammars are refused: an answer that ignored one would be wrong.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from math import inf
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from midfill.errors import InvalidRequestError
from midfill.frontend.answer import Answer, AnswerDelta
from midfill.frontend.generation import Usage, best_first, whole_answers
from midfill.frontend.prompt import Prompt, PromptSource
from midfill.frontend.sampling import (
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    PostProcessing,
    SamplingParams,
    check_sampling,
)
from midfill.infill.context_files import ContextFile
from midfill.infill.request import InfillRequest
from midfill.serving.server.bodies import body_reference, json_response, read_json
from midfill.serving.server.dialects.dialect import Dialect, TenantOf
from midfill.serving.server.dialects.logprobs import logprob_object
from midfill.serving.server.request import (
    Generation,
    GenerationRequest,
    Timings,
    check_answer_count,
    limited_to_a_hole,
)
from midfill.serving.server.responses import ApiError, ServerSentEvents, error_message
from midfill.serving.server.service import ModelService

_MAX_SNIPPETS = 256  # the last ones count
_INFILL_NAMES = {"prompt": "input_prefix", "suffix": "input_suffix", "context": "input_extra"}
_MAX_SAMPLERS = 64
_MAX_BIASED_CHARACTERS = 8192  # of all texts in a logit_bias, which are tokenised at once
_SAMPLERS = ("top_k", "typ_p", "top_p", "min_p", "temperature")

_SHORT_SAMPLERS = {
    "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p", "t": "temperature", "i": "infill",
}  # fmt: skip

_TYPICAL_NAMES = ("typ_p", "typical_p", "typical", "typ")

# llama.cpp's sampler "infill" drops tokens below this probability, and the most likely one of the
# others is nearly always the answer's. One answer gets it always, and several differ.
_INFILL_MIN_P = 0.2

_FIELD_NAMES = {
    "max_tokens": "n_predict", "n": "n_cmpl", "logprobs": "n_probs", "min_indent": "n_indent",
}  # fmt: skip

_ERROR_TYPES = {
    401: "authentication_error", 404: "not_found_error", 429: "unavailable_error",
    500: "server_error", 501: "not_supported_error", 503: "unavailable_error",
}  # fmt: skip

_SLOT = 0  # midfill has no slots for clients to choose from


class LlamaCppFields(msgspec.Struct, kw_only=True):
    """Fields of /completion and /infill; null always means the default."""

    model: str | None = None  # there is one, whatever it is called
    stream: bool | None = None
    n_predict: int | None = None
    max_tokens: int | None = None
    n_cmpl: int | None = None
    n: int | None = None
    n_indent: int | None = None
    n_probs: int | None = None
    t_max_predict_ms: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float | bool] | list[tuple[int | str, float | bool]] | None = None
    ignore_eos: bool | None = None
    samplers: str | list[str] | None = None
    return_tokens: bool | None = None
    response_fields: list[str] | None = None
    grammar: str | None = None
    json_schema: Any = None

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens; None fills the context, 0 computes the prompt only."""
        given = self.max_tokens if self.n_predict is None else self.n_predict
        return None if given is None or given < 0 else given

    @property
    def answers(self) -> int:
        """Number of answers to each prompt."""
        given = self.n if self.n_cmpl is None else self.n_cmpl
        return 1 if given is None else given

    @property
    def active_samplers(self) -> frozenset[str]:
        """The samplers that are applied.

        Raises:
            InvalidRequestError: there are far more than there are samplers.
        """
        names = _SAMPLERS if self.samplers is None else self.samplers
        if len(names) > _MAX_SAMPLERS:
            raise InvalidRequestError.of_field(
                "samplers", f"must be at most {_MAX_SAMPLERS} names, not {len(names)}"
            )
        if isinstance(names, str):
            names = [_SHORT_SAMPLERS.get(letter, letter) for letter in names]
        return frozenset("typ_p" if name in _TYPICAL_NAMES else name for name in names)

    def sampling(self, service: ModelService) -> SamplingParams:
        """Return the sampling parameters, checked; those of ``limit`` 0 allow one token.

        Raises:
            InvalidRequestError: a field is out of range, or asks for a grammar.
        """
        if self.grammar or self.json_schema is not None:
            param = "grammar" if self.grammar else "json_schema"
            raise InvalidRequestError(f"{param} is not supported", param=param)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        limit = service.context if self.limit is None else max(self.limit, 1)
        try:
            post_processing = PostProcessing(
                min_indent=self.n_indent or 0,
                max_seconds=(self.t_max_predict_ms or 0) / 1000 or inf,
            )
        except InvalidRequestError as error:
            raise error.renamed({**_FIELD_NAMES, "max_seconds": "t_max_predict_ms"}) from None
        sampling = SamplingParams(
            max_tokens=limit,
            n=self.answers,
            stop=tuple(text for text in stop if text),
            seed=None if self.seed in (None, -1, 2**32 - 1) else self.seed,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self._logit_bias(service),
            ignore_eos=bool(self.ignore_eos),
            logprobs=min(self.n_probs, MAX_LOGPROBS) if self.n_probs else None,
            post_processing=post_processing,
            **self._filters(),
        )
        check_sampling(sampling, service.tokenizer.vocab_size, _FIELD_NAMES)
        return sampling

    def _filters(self) -> dict[str, Any]:
        """Return temperature, top_k, top_p, min_p and typical_p, as far as they are applied."""
        active = self.active_samplers
        temperature = 0.8 if self.temperature is None else max(self.temperature, 0.0)
        filters: dict[str, Any] = {
            "temperature": temperature if "temperature" in active else 1.0,
            "top_k": max(40 if self.top_k is None else self.top_k, 0) if "top_k" in active else 0,
            "min_p": (0.05 if self.min_p is None else self.min_p) if "min_p" in active else 0.0,
        }
        if "top_p" in active:
            filters["top_p"] = 0.95 if self.top_p is None else min(self.top_p, 1.0)
        if "typ_p" in active and self.typical_p is not None:
            filters["typical_p"] = min(self.typical_p, 1.0)
        if "infill" in active:
            filters["min_p"] = max(filters["min_p"], _INFILL_MIN_P)
            if self.answers == 1:
                filters["temperature"] = 0.0
        return filters

    def _logit_bias(self, service: ModelService) -> dict[int, float]:
        """Return the biases by token; those of a text are its tokens', false means never."""
        given = self.logit_bias or {}
        entries = list(given.items()) if isinstance(given, dict) else given
        if len(entries) > MAX_LOGIT_BIASES:
            raise InvalidRequestError.of_field(
                "logit_bias", f"must be of at most {MAX_LOGIT_BIASES} entries, not {len(entries)}"
            )
        characters = sum(len(key) for key, _ in entries if isinstance(key, str))
        if characters > _MAX_BIASED_CHARACTERS:
            raise InvalidRequestError.of_field(
                "logit_bias",
                f"names texts of {characters} characters; at most {_MAX_BIASED_CHARACTERS} are"
                " accepted",
            )
        biases: dict[int, float] = {}
        for key, value in entries:
            number = -100.0 if value is False else float(value)
            if isinstance(key, int):
                biases[key] = number
            elif key.isascii() and key.isdecimal():  # no id is as long as what is cut off
                biases[int(key.lstrip("0")[:18] or 0)] = number
            else:
                biases.update(dict.fromkeys(service.tokenizer.encode(key), number))
        return biases


def error_body(error: ApiError) -> dict[str, object]:
    """Return llama.cpp's shape of an error."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    if error.code == "context_length_exceeded":
        kind = "exceed_context_size_error"
    return {"error": {"code": error.status, "message": error_message(error), "type": kind}}


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
            context_files=tuple(ContextFile(entry.text, entry.filename or "") for entry in extra),
            snippets=True,
        )

    def source(self, tenant: str) -> PromptSource:
        """Return what the prompt is made of."""
        return PromptSource(text=self.request(tenant), field_names=_INFILL_NAMES)


class CompletionBody(LlamaCppFields, kw_only=True):
    """The body of POST /completion: a raw prompt, in which special tokens are parsed, or several.

    A list of numbers is one prompt.
    """

    prompt: str | list[str | int | list[int]]

    def sources(self, tenant: str) -> list[PromptSource]:
        """Return what the prompts are made of."""
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
            PromptSource(text=InfillRequest(prefix=item, raw=True, tenant=tenant))
            if isinstance(item, str)
            else PromptSource(token_ids=item)
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
        prompts = await service.encode([body.source(tenant)])
        return await _answer(body, prompts, service.for_editor(sampling), tenant)

    @router.post("/completion", openapi_extra=body_reference(CompletionBody))
    @router.post("/completions", openapi_extra=body_reference(CompletionBody))
    async def completion(request: Request, tenant: Annotated[str, Depends(tenant_of)]) -> Response:
        """Continue raw prompts."""
        body = await read_json(request, CompletionBody, limit, any_content_type=True)
        sampling = body.sampling(service)
        prompts = await service.encode(body.sources(tenant))
        return await _answer(body, prompts, sampling, tenant)

    async def _answer(
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
        generation = service.generate(
            GenerationRequest(prompts, sampling, tenant, bool(body.stream))
        )
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


class Results:
    """The answers to one request.

    Args:
        body: what the client asked for.
        sampling: what it means here.
        service: the model.
    """

    def __init__(
        self, body: LlamaCppFields, sampling: SamplingParams, service: ModelService
    ) -> None:
        self._body = body
        self._sampling = sampling
        self._service = service

    async def whole(self, generation: Generation) -> object:
        """Run the generation; return its one result, or a list of them, the best first."""
        results = [
            self._final(response.prompt, place * self._sampling.n + index, answer, generation)
            for place, (response, result) in enumerate(
                zip(generation.responses, await generation.whole(), strict=True)
            )
            for index, answer in enumerate(best_first(result.answers))
        ]
        return results[0] if len(results) == 1 else results

    def of_prefill(self, prompts: Sequence[Prompt]) -> object:
        """Return the result, or results, of a request that only computes its prompts."""
        answer = Answer("", (), "length", None, ())
        results = [
            self._result(prompt, place, answer, Usage(len(prompt.token_ids)), Timings(0, 0))
            for place, prompt in enumerate(prompts)
        ]
        return results[0] if len(results) == 1 else results

    async def events(self, generation: Generation) -> AsyncGenerator[object, None]:
        """Yield each answer in pieces, then its result without the text."""
        written: dict[int, list[AnswerDelta]] = {}
        async for place, delta in generation.deltas():
            response = generation.responses[place]
            number = place * self._sampling.n + delta.index
            written.setdefault(number, []).append(delta)
            if delta.text:
                yield {
                    "index": number,
                    "content": delta.text,
                    "tokens": _known(delta.token_ids),
                    "stop": False,
                    "id_slot": _SLOT,
                    "tokens_predicted": sum(len(part.token_ids) for part in written[number]),
                    "tokens_evaluated": response.usage.prompt_tokens,
                }
            if delta.finish_reason is not None:
                (answer,) = whole_answers(response, written[number]).answers
                yield self._final(response.prompt, number, answer, generation)

    def _final(self, prompt: Prompt, number: int, answer: Answer, generation: Generation) -> object:
        usage = generation.responses[number // self._sampling.n].usage
        return self._result(prompt, number, answer, usage, generation.timings)

    def _result(
        self, prompt: Prompt, number: int, answer: Answer, usage: Usage, timings: Timings
    ) -> Mapping[str, Any]:
        """Return a result with the fields that the client selected: all, if it selected none."""
        generated = len(answer.token_ids)
        stopped_by = answer.stop_reason if isinstance(answer.stop_reason, str) else ""
        ended = "word" if stopped_by else "eos"
        result: dict[str, Any] = {
            "index": number,
            "content": "" if self._body.stream else answer.text,
            "tokens": _known(answer.token_ids) if self._body.return_tokens else (),
            "id_slot": _SLOT,
            "stop": True,
            "model": self._service.name,
            "tokens_predicted": generated,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": self._settings(),
            "prompt": prompt.text,
            "has_new_line": "\n" in answer.text,
            "truncated": usage.prompt_tokens + generated >= self._service.context,
            "stop_type": "limit" if answer.finish_reason == "length" else ended,
            "stopping_word": stopped_by,
            "tokens_cached": usage.cached_tokens,
            "timings": _timings(usage, generated, timings),
        }
        if self._sampling.logprobs is not None:
            result["completion_probabilities"] = [
                logprob_object(report, ids=True) for report in answer.logprobs
            ]
        return _select(result, self._body.response_fields or [])

    def _settings(self) -> dict[str, Any]:
        """Return the settings that were applied."""
        sampling, ends = self._sampling, self._sampling.post_processing
        return {
            "n_ctx": self._service.context,
            "model": self._service.name,
            "n_predict": sampling.max_tokens,
            "n_cmpl": sampling.n,
            "n_indent": ends.min_indent,
            "t_max_predict_ms": 0 if ends.max_seconds == inf else ends.max_seconds * 1000,
            "seed": -1 if sampling.seed is None else sampling.seed,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "typical_p": sampling.typical_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "ignore_eos": sampling.ignore_eos,
            "stop": sampling.stop,
            "stream": bool(self._body.stream),
            "samplers": sorted(self._body.active_samplers),
        }


def _known(token_ids: Sequence[int]) -> list[int]:
    """Return the ids that the engine knows; see ``EngineOutput.token_bytes``."""
    return [token_id for token_id in token_ids if token_id >= 0]


def _timings(usage: Usage, generated: int, timings: Timings) -> dict[str, float]:
    computed = usage.computed_tokens
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": timings.prompt * 1000,
        "prompt_per_token_ms": _ratio(timings.prompt * 1000, computed),
        "prompt_per_second": _ratio(computed, timings.prompt),
        "predicted_n": generated,
        "predicted_ms": timings.generation * 1000,
        "predicted_per_token_ms": _ratio(timings.generation * 1000, generated),
        "predicted_per_second": _ratio(generated, timings.generation),
    }


def _ratio(amount: float, number: float) -> float:
    return amount / number if number else 0.0


def _select(result: Mapping[str, Any], paths: Sequence[str]) -> Mapping[str, Any]:
    """Return the values at the paths that exist, by path; all fields if no path is given.

    ``timings/prompt_n`` is the name of a field then, as llama.cpp has it.
    """
    selected: dict[str, Any] = {}
    for path in paths:
        value: Any = result
        for name in path.split("/"):
            value = value.get(name, msgspec.UNSET) if isinstance(value, Mapping) else msgspec.UNSET
        if value is not msgspec.UNSET:
            selected[path] = value
    return selected if paths else result
