"""POST /v1/completions: raw prompts, and infilling with a ``suffix`` or a filled-in template.

DeepSeek's FIM endpoint is the same at the paths of its beta API.
"""

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from midfill.errors import InvalidRequestError
from midfill.frontend.answer import Candidate, TokenLogprob
from midfill.frontend.confidence import Confidence
from midfill.frontend.generation import PromptToken
from midfill.frontend.prompt import Prompt, PromptSource
from midfill.frontend.sampling import PostProcessing, SamplingParams, check_sampling
from midfill.frontend.token_report import TokenReport
from midfill.infill.context_files import ContextFile
from midfill.infill.request import InfillRequest, RequestedLayout, WindowMode
from midfill.infill.trim import Brackets, Lines
from midfill.infill.window import WindowRule
from midfill.serving.server.bodies import body_reference, json_response, read_json
from midfill.serving.server.dialects.dialect import Dialect, TenantOf
from midfill.serving.server.dialects.llama_cpp import ExtraSnippet
from midfill.serving.server.dialects.logprobs import floor_logprob
from midfill.serving.server.dialects.openai import (
    GenerationFields,
    check_method,
    midfill_object,
    model_routes,
    usage_object,
)
from midfill.serving.server.dialects.tabby import Segments, complete_segments
from midfill.serving.server.request import (
    HOLE_TEMPERATURE,
    Generation,
    GenerationRequest,
    check_answer_count,
    limited_to_a_hole,
)
from midfill.serving.server.responses import EventStream
from midfill.serving.server.service import ModelService

_DEFAULT_MAX_TOKENS = 16
_MAX_CONTEXT_FILES = 256


class ContextEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A file, or a part of one, to show the model in addition to the document.

    Attributes:
        text: its text.
        path: its path, if known.
    """

    text: str
    path: str | None = None


class WindowFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How much of the text around the caret to show the model, in characters.

    Attributes:
        before: about how many before the caret; null takes the server's number.
        after: at most how many after it; null takes the server's number.
    """

    before: int | None = None
    after: int | None = None

    def rule(self, default: WindowRule) -> WindowRule:
        """Return the rule that the fields ask for.

        Raises:
            InvalidRequestError: a number is too small.
        """
        before = default.before if self.before is None else self.before
        after = default.after if self.after is None else self.after
        return WindowRule(before, after)


class MidfillFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The request's ``midfill`` object.

    Attributes:
        layout: how to lay the prompt out; null means "auto".
        document: the client's name for the document, if it has one.
        supersede: end the requests of this document that are still running, if they set this, too,
            and are for another text.
        window: how much of the text around the caret to show the model. "as-sent" shows exactly
            what was sent; null and "stable" leave it to the server.
        healing: false continues right at the caret. Otherwise, where a longer token could begin
            like the last tokens before the caret, the model writes these again, and they are left
            out of the answer.
        empty_threshold: the answer is empty where the probability of an empty answer is above
            this, and has text elsewhere; 0 leaves it to each token. null takes the model's.
        open_line: answer a caret at the start of a line that has text as on an empty line above it;
            the answer then ends with a line break. null does what the model needs.
        context: other files to show the model; those that change least come first.
        context_characters: at most so many characters of other files are shown, the last ones; null
            shows all of ``context``, and what the model profits from of files in a template.
        path, repository: where the document is, shown in the model family's own format.
        trim: end the answer where it begins to repeat the suffix; null does so if there is one.
        lines: "single" ends the answer at its first line break, "block" where the block around
            the caret ends.
        brackets: "close" closes what the answer leaves open.
        suggestion: of an answer that isn't streamed, return only the part that is worth showing to
            somebody who didn't ask for it: complete, and no repetition.
        min_confidence: the answer is empty where the estimate that its first line is right is below
            this; 0 only tells the estimate, "editor" takes what editors' requests have. null does
            neither.
        candidates: how many answers to try where the model is undecided; of an answer that isn't
            streamed, the one with the most probable first line is returned. null tries no others,
            and as many as for editors with ``min_confidence`` "editor".
        method: compresses the prompt's KV, as in "cake:budget=256", if the server allows it.
        report: "tokens" adds the prompt's tokens to the response, and what the same prompt would
            have cost in PSM order.
    """

    layout: RequestedLayout | None = None
    document: str | None = None
    supersede: bool | None = None
    window: WindowMode | WindowFields | None = None
    healing: bool | None = None
    empty_threshold: float | None = None
    open_line: bool | None = None
    context: list[ContextEntry] | None = None
    context_characters: int | None = None
    path: str | None = None
    repository: str | None = None
    trim: bool | None = None
    lines: Lines | None = None
    brackets: Brackets | None = None
    suggestion: bool | None = None
    min_confidence: float | Literal["editor"] | None = None
    candidates: int | None = None
    method: str | None = None
    report: Literal["tokens"] | None = None

    @property
    def superseded(self) -> str | None:
        """The document whose older requests end; None ends none.

        Raises:
            InvalidRequestError: the document has no name.
        """
        if not self.supersede:
            return None
        if self.document is None:
            raise InvalidRequestError(
                "midfill.supersede needs midfill.document, a name for the document",
                param="midfill.supersede",
            )
        return self.document

    def post_processing(self) -> PostProcessing:
        """Return what to change in the answer."""
        return PostProcessing(
            overlap=self.trim,
            lines=self.lines or "all",
            brackets=self.brackets or "keep",
            suggestion=bool(self.suggestion),
        )


class CompletionRequest(GenerationFields, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None
    return_token_ids: bool | None = None  # vLLM's
    midfill: MidfillFields | None = None
    input_extra: list[ExtraSnippet] | None = None  # llama.cpp's spelling of ``context``
    segments: Segments | None = None  # instead of a prompt: the request is Tabby's
    mode: str | None = None  # Tabby's

    def context_files(self) -> tuple[ContextFile, ...]:
        """Return the other files to show the model, in either spelling."""
        extra = [ContextFile(entry.text, entry.filename or "") for entry in self.input_extra or ()]
        own = self.midfill.context if self.midfill is not None else None
        return (*extra, *(ContextFile(entry.text, entry.path or "") for entry in own or ()))


def routes(service: ModelService, tenant_of: TenantOf) -> APIRouter:
    """Return the router of the endpoint."""
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=body_reference(CompletionRequest))
    @router.post("/beta/completions", openapi_extra=body_reference(CompletionRequest))
    @router.post("/beta/v1/completions", openapi_extra=body_reference(CompletionRequest))
    async def completions(request: Request, tenant: Annotated[str, Depends(tenant_of)]) -> Response:
        """Continue a prompt, or fill in between ``prompt`` and ``suffix``."""
        body = await read_json(request, CompletionRequest, service.max_body_bytes)
        if body.segments is not None and body.prompt is None:
            return await complete_segments(
                service,
                tenant,
                body.segments,
                mode=body.mode,
                temperature=body.temperature,
                seed=body.seed,
            )
        model = service.check_model(body.model)
        sampling, hints = _sampling(body, service), body.hints()
        superseded = body.midfill.superseded if body.midfill is not None else None
        check_method(None if body.midfill is None else body.midfill.method, service)
        prompts = await service.encode(_prompt_sources(body, service, tenant))
        sampling = _for_prompts(sampling, body, prompts)
        check_answer_count(len(prompts), sampling.n)
        generation = service.generate(
            GenerationRequest(prompts, sampling, tenant, bool(body.stream), superseded, hints)
        )
        answer = _CompletionResponse(generation, model, body)
        if body.midfill is not None and body.midfill.report == "tokens":
            answer.reports = await service.report_tokens(prompts, tenant)
        if body.stream:
            return EventStream(answer.events())
        return json_response(await answer.whole())

    router.routes.extend(model_routes(service, tenant_of).routes)
    return router


# DeepSeek's paths are those of its beta API.
_PATHS = ("/v1/completions", "/beta/completions", "/beta/v1/completions")
DIALECT = Dialect(routes=routes, bodies=(CompletionRequest,), queued=_PATHS)


def _sampling(body: CompletionRequest, service: ModelService) -> SamplingParams:
    """Return the checked sampling parameters, as far as they don't depend on the prompts."""
    sampling = body.sampling(default_max_tokens=_DEFAULT_MAX_TOKENS, logprobs=body.logprobs)
    if body.midfill is not None:
        least = body.midfill.min_confidence
        sampling = msgspec.structs.replace(
            sampling,
            post_processing=body.midfill.post_processing(),
            min_confidence=service.min_confidence if least == "editor" else least,
            candidates=_candidates(body.midfill, service),
        )
    if body.echo and (body.logprobs is not None or sampling.max_tokens == 0):
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=body.logprobs or 0)
    if body.best_of is not None:
        if body.best_of < sampling.n:
            raise InvalidRequestError(
                f"best_of must be at least n, which is {sampling.n}, not {body.best_of}",
                param="best_of",
            )
        if body.stream and body.best_of > sampling.n:
            raise InvalidRequestError(
                "best_of can't be streamed: the best answers are known at the end", param="best_of"
            )
        logprobs = sampling.logprobs
        if body.best_of > sampling.n and logprobs is None:
            logprobs = 0
        sampling = msgspec.structs.replace(sampling, n=body.best_of, logprobs=logprobs)
    names = {name: f"midfill.{name}" for name in ("min_confidence", "candidates")}
    names |= {} if body.best_of is None else {"n": "best_of"}
    check_sampling(sampling, service.tokenizer.vocab_size, names)
    body.wants_usage()
    return sampling


def _candidates(fields: MidfillFields, service: ModelService) -> int:
    """Return how many answers to try.

    Raises:
        InvalidRequestError: several, where no other can be tried.
    """
    asked = fields.candidates
    if asked is None:
        return (fields.min_confidence == "editor" and service.candidates) or 1
    if service.candidates is None and asked > 1:
        raise InvalidRequestError.of_field(
            "midfill.candidates", "must be 1 here: answers are generated elsewhere"
        )
    return asked


def _for_prompts(
    sampling: SamplingParams, body: CompletionRequest, prompts: Sequence[Prompt]
) -> SamplingParams:
    """Return the sampling parameters for these prompts.

    Raises:
        InvalidRequestError: a prompt's log probabilities are asked for, and it is laid out anew.
    """
    infilling = all(prompt.infilling for prompt in prompts)
    if sampling.prompt_logprobs is not None and any(prompt.infilling for prompt in prompts):
        raise InvalidRequestError(
            "echo with logprobs, or with max_tokens 0, is for raw prompts: an infilling prompt is"
            ' laid out anew; leave out echo, or send the prompt with midfill.layout "verbatim"',
            param="echo",
        )
    if not infilling:
        return sampling
    if body.temperature is None:
        sampling = msgspec.structs.replace(sampling, temperature=HOLE_TEMPERATURE)
    return sampling if body.max_tokens is not None else limited_to_a_hole(sampling)


def _prompt_sources(
    body: CompletionRequest, service: ModelService, tenant: str
) -> list[PromptSource]:
    """Return what ``prompt`` holds: a text, texts, token ids, or lists of token ids."""
    given = body.prompt
    if given is None:
        raise InvalidRequestError("prompt is missing", param="prompt")
    if isinstance(given, list) and given and all(isinstance(item, int) for item in given):
        items: Sequence[object] = [given]
    else:
        items = given if isinstance(given, list) else [given]
    if not items:
        raise InvalidRequestError("prompt is empty", param="prompt")
    check_answer_count(len(items), 1)
    names = _field_names(body)
    if len({type(item) for item in items}) > 1 or isinstance(items[0], int):
        raise InvalidRequestError("prompt mixes texts and token ids", param="prompt")
    try:
        return [_prompt_source(body, item, names, service.window, tenant) for item in items]
    except InvalidRequestError as error:
        raise error.renamed(names) from None


def _prompt_source(
    body: CompletionRequest,
    item: object,
    names: Mapping[str, str],
    default_window: WindowRule,
    tenant: str,
) -> PromptSource:
    """Return a list of token ids, or a text: the prefix if there is a suffix, else a raw prompt."""
    fields = body.midfill or MidfillFields()
    text: InfillRequest | None = None
    if isinstance(item, list):
        if body.suffix is not None:
            raise InvalidRequestError(
                "a prompt of token ids can't have a suffix; send text", param="suffix"
            )
    else:
        assert isinstance(item, str)
        window = fields.window or "stable"
        text = InfillRequest(
            prefix=item,
            suffix=body.suffix or "",
            raw=body.suffix is None,
            layout=fields.layout or "auto",
            document=fields.document,
            tenant=tenant,
            window=window.rule(default_window) if isinstance(window, WindowFields) else window,
            context_files=body.context_files(),
            context_characters=_checked_characters(fields.context_characters),
            open_line=fields.open_line,
            path=fields.path or "",
            repository=fields.repository or "",
        )
    return PromptSource(
        text=text,
        token_ids=item if isinstance(item, list) else None,
        healing=fields.healing is not False,
        stop_token_ids=body.stop_token_ids or (),
        empty_threshold=fields.empty_threshold,
        method=fields.method,
        prediction=body.predicted_text,
        field_names=names,
    )


def _checked_characters(characters: int | None) -> int | None:
    """Return the number.

    Raises:
        InvalidRequestError: it is negative.
    """
    if characters is not None and characters < 0:
        raise InvalidRequestError(
            f"midfill.context_characters must be at least 0, not {characters}",
            param="midfill.context_characters",
        )
    return characters


def _field_names(body: CompletionRequest) -> dict[str, str]:
    """Return how the client spelled the fields of infilling, by the encoder's names.

    Raises:
        InvalidRequestError: there are too many files, or the prompt is not to be infilled.
    """
    fields = body.midfill or MidfillFields()
    context = "input_extra" if body.input_extra else "midfill.context"
    count = len(body.context_files())
    if count > _MAX_CONTEXT_FILES:
        raise InvalidRequestError(
            f"{context} holds {count} files; at most {_MAX_CONTEXT_FILES} are accepted",
            param=context,
        )
    given = {context: count, "midfill.path": fields.path, "midfill.repository": fields.repository}
    useless = next((name for name, value in given.items() if value), None)
    if useless is not None and (body.suffix is None or fields.layout == "verbatim"):
        raise InvalidRequestError(
            f"{useless} is only for infilling; send a suffix, which may be empty", param=useless
        )
    windows = {f"window.{name}": f"midfill.window.{name}" for name in ("before", "after")}
    own = {name: f"midfill.{name}" for name in ("path", "empty_threshold")}
    return {"context": context, **own, **windows}


class _CompletionResponse:
    """One response.

    Args:
        generation: generates the answers, ``n`` or more for each prompt.
        model: the name that the client called the model by.
        body: says what of them to return: the best ``n``, echo, log probabilities (of the echoed
            prompt, too), usage, token ids.

    Attributes:
        reports: of the prompts' tokens, if the client wants them.
    """

    def __init__(self, generation: Generation, model: str, body: CompletionRequest) -> None:
        self.reports: list[TokenReport | None] = []
        self._generation = generation
        self._answers = body.n or 1
        self._echo = bool(body.echo)
        self._logprobs = body.logprobs is not None
        self._usage = body.wants_usage()
        self._token_ids = bool(body.return_token_ids)
        self._head: dict[str, object] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> dict[str, object]:
        """Return the whole response."""
        results = await self._generation.whole()
        choices: list[dict[str, Any]] = []
        confidences: list[Confidence | None] = []
        for place, (response, result) in enumerate(
            zip(self._generation.responses, results, strict=True)
        ):
            echoed = response.prompt.text if self._echo else ""
            prompt = response.prompt_tokens if self._echo else ()
            for index, best in enumerate(response.best_answers(self._answers)):
                answer = result.answers[best]
                choice = self._choice(place, index, echoed + answer.text)
                choice["logprobs"] = self._logprobs_object(answer.logprobs, prompt, len(echoed))
                choice["finish_reason"] = answer.finish_reason
                choice["stop_reason"] = answer.stop_reason
                if self._token_ids:
                    choice["token_ids"] = answer.token_ids
                choices.append(choice)
                confidences.append(answer.confidence)
        body = {**self._head, "choices": choices, "usage": usage_object(self._generation.usage)}
        self._add_midfill(body, choices)
        self._add_confidence(body, choices, confidences)
        return body

    async def events(self) -> AsyncGenerator[dict[str, object], None]:
        """Yield the response in chunks; the first of each choice holds what is echoed."""
        started: set[int] = set()
        async for place, delta in self._generation.deltas():
            response = self._generation.responses[place]
            number = place * self._answers + delta.index
            echoed = response.prompt.text if self._echo else ""
            is_first = number not in started
            prompt = response.prompt_tokens if self._echo and is_first else ()
            choice = self._choice(place, delta.index, (echoed if is_first else "") + delta.text)
            choice["logprobs"] = self._logprobs_object(delta.logprobs, prompt, len(echoed))
            choice["finish_reason"] = delta.finish_reason
            choice["stop_reason"] = delta.stop_reason
            if self._token_ids:
                choice["token_ids"] = delta.token_ids
            chunk: dict[str, object] = {**self._head, "choices": [choice]}
            if is_first:
                started.add(number)
                self._add_midfill(chunk, [choice])
            if delta.finish_reason is not None:
                self._add_confidence(chunk, [choice], [delta.confidence])
            if self._usage:
                chunk["usage"] = None
            yield chunk
        if self._usage:
            yield {**self._head, "choices": [], "usage": usage_object(self._generation.usage)}

    def _choice(self, place: int, index: int, text: str) -> dict[str, Any]:
        return {
            "index": place * self._answers + index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }

    def _add_midfill(self, body: dict[str, object], choices: Sequence[dict[str, Any]]) -> None:
        """Add how prompts were laid out, to each choice if there are several prompts."""
        responses = self._generation.responses
        targets: list[dict[str, Any]] = list(choices) if len(responses) > 1 else [body]
        for target in targets:
            place = target.get("index", 0) // self._answers
            found = midfill_object(responses[place].prompt, responses[place].usage)
            if found is not None:
                target["midfill"] = found
                if self.reports:
                    found["report"] = self.reports[place]

    def _add_confidence(
        self,
        body: dict[str, Any],
        choices: Sequence[dict[str, Any]],
        confidences: Sequence[Confidence | None],
    ) -> None:
        """Add how sure the answers are, to each choice if there are several."""
        targets = [body] if len(choices) == 1 and len(self._generation.responses) == 1 else choices
        for target, confidence in zip(targets, confidences, strict=True):
            if confidence is not None and confidence.estimate is not None:
                found = target.setdefault("midfill", {})
                found["confidence"] = round(confidence.estimate, 4)

    def _logprobs_object(
        self, reports: Sequence[TokenLogprob], prompt: Sequence[PromptToken], start: int
    ) -> dict[str, object] | None:
        """Return OpenAI's ``logprobs``.

        Args:
            reports: of the answer's tokens.
            prompt: the prompt's tokens, if they are reported, too.
            start: where the answer's text starts.
        """
        if not self._logprobs:
            return None
        top: list[dict[str, float] | None] = [
            None if token.logprob is None else _by_text(token.top, token.text, token.logprob)
            for token in prompt
        ]
        return {
            "tokens": [token.text for token in prompt] + [report.chosen.text for report in reports],
            "token_logprobs": [
                None if token.logprob is None else floor_logprob(token.logprob) for token in prompt
            ]
            + [floor_logprob(report.chosen.logprob) for report in reports],
            "top_logprobs": top
            + [
                _by_text(report.top, report.chosen.text, report.chosen.logprob)
                for report in reports
            ],
            "text_offset": [token.offset for token in prompt]
            + [start + report.offset for report in reports],
        }


def _by_text(top: Sequence[Candidate], text: str, logprob: float) -> dict[str, float]:
    """Return the log probabilities of the most likely tokens, and of the token itself, by text."""
    found = {candidate.text: floor_logprob(candidate.logprob) for candidate in top}
    return {**found, text: floor_logprob(logprob)}
