"""What OpenAI's endpoints share, POST /v1/chat/completions, and GET /v1/models.

Unknown fields are ignored, as by OpenAI and vLLM. Known fields that are not supported are refused
rather than silently ignored. Conversations are rendered with the model's own chat template.
"""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from midfill.engine.request import RequestHints
from midfill.engine.validation import check_hints
from midfill.errors import InvalidRequestError
from midfill.frontend.answer import Answer, AnswerDelta, TokenLogprob
from midfill.frontend.channels import Call, CallPiece
from midfill.frontend.generation import Usage
from midfill.frontend.prompt import Prompt, PromptSource, check_message_count
from midfill.frontend.sampling import SamplingParams, check_sampling
from midfill.infill.formats import FimFormat
from midfill.serving.server.bodies import body_reference, json_response, read_json
from midfill.serving.server.dialects.chat_fields import (
    Tool,
    check_template_kwargs,
    check_tools,
    effort_fields,
    reasoning_fields,
)
from midfill.serving.server.dialects.dialect import Dialect, TenantOf
from midfill.serving.server.dialects.logprobs import logprob_object
from midfill.serving.server.request import Generation, GenerationRequest
from midfill.serving.server.responses import EventStream
from midfill.serving.server.service import ListedModel, ModelService

_MAX_EXPECTED = 2**31 - 1


class StreamOptions(msgspec.Struct, kw_only=True):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None


class PredictionPart(msgspec.Struct, kw_only=True):
    """A part of a prediction's content."""

    text: str
    type: Literal["text"] = "text"


class Prediction(msgspec.Struct, kw_only=True):
    """OpenAI's ``prediction``: a text that the answer will probably be."""

    content: str | list[PredictionPart]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        """The whole text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class GenerationFields(msgspec.Struct, kw_only=True):
    """Fields of both endpoints; null always means the default.

    The fields from ``top_k`` to ``priority`` are vLLM's additions, and ``job_id`` and
    ``is_last_step`` those of Continuum's version of it.
    """

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    user: str | None = None
    prediction: Prediction | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    job_id: str | None = None
    is_last_step: bool | None = None
    expected_tokens: int | None = None

    @property
    def predicted_text(self) -> str:
        """What the answer will probably be; "" if the client doesn't say."""
        return "" if self.prediction is None else self.prediction.text

    def hints(self) -> RequestHints:
        """Return what the fields say for the scheduler.

        Raises:
            InvalidRequestError: a value makes no sense.
        """
        expected = self.expected_tokens
        hints = RequestHints(
            priority=self.priority or 0,
            # Beyond the context all count alike, and messages have numbers of 64 bits.
            expected_tokens=None if expected is None else min(expected, _MAX_EXPECTED),
            program=self.job_id or "",
            last_step=bool(self.is_last_step),
        )
        check_hints(hints)
        return hints

    def sampling(self, *, default_max_tokens: int, logprobs: int | None) -> SamplingParams:
        """Return the sampling parameters that the fields ask for, not yet checked."""
        given: dict[str, Any] = {
            "max_tokens": default_max_tokens if self.max_tokens is None else self.max_tokens,
            "logprobs": logprobs,
            # vLLM's former value for "all tokens".
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "stop": (self.stop,) if isinstance(self.stop, str) else self.stop and tuple(self.stop),
            "stop_token_ids": self.stop_token_ids and tuple(self.stop_token_ids),
        }
        for name in (
            "temperature", "top_p", "n", "presence_penalty", "frequency_penalty", "logit_bias",
            "seed", "min_p", "typical_p", "repetition_penalty", "ignore_eos",
            "include_stop_str_in_output",
        ):  # fmt: skip
            given[name] = getattr(self, name)
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage.

        Raises:
            InvalidRequestError: stream_options without stream.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is only for stream = true", param="stream_options"
            )
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def usage_object(usage: Usage) -> dict[str, object]:
    """Return OpenAI's ``usage`` object; without cached tokens where nobody knows them."""
    fields: dict[str, object] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.knows_cached:
        fields["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return fields


def midfill_object(prompt: Prompt, usage: Usage) -> dict[str, object] | None:
    """Return the response's ``midfill`` object; None if the prompt has no layout."""
    if prompt.report is None:
        return None
    fields: dict[str, object] = {
        "layout": prompt.report.layout,
        "sentinels": prompt.report.sentinels,
    }
    if usage.knows_cached:
        fields["cached_tokens"] = usage.cached_tokens
        fields["computed_tokens"] = usage.computed_tokens
    if usage.reused_tokens:
        fields["reused_tokens"] = usage.reused_tokens
    if prompt.report.cut is not None:
        fields["cut"] = prompt.report.cut
    if prompt.report.window is not None:
        before, after = prompt.report.window
        fields["window"] = {"before": before, "after": after}
    if prompt.report.template is not None:
        fields["template"] = prompt.report.template
    if prompt.report.document is not None:
        fields["document"] = prompt.report.document
    if prompt.report.healed:
        fields["healed"] = prompt.report.healed
    if prompt.line_break:
        fields["opened_line"] = True
    return fields


class TextPart(msgspec.Struct, kw_only=True):
    """A part of a message's content; this server accepts text only."""

    type: Literal["text"]
    text: str


class CalledFunction(msgspec.Struct, kw_only=True):
    """What an earlier message called; ``arguments`` is JSON, as the model wrote it."""

    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call in an earlier message."""

    function: CalledFunction
    id: str | None = None

    def fields(self) -> dict[str, Any]:
        """Return what the template sees: the arguments' values, where they are JSON."""
        arguments: Any = self.function.arguments
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(self.function.arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id or "", "type": "function", "function": function}


class ChatMessage(msgspec.Struct, kw_only=True):
    """One turn; of reasoning, templates render what they want to be rendered again."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def fields(self) -> dict[str, Any]:
        """Return what the template sees."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        fields: dict[str, Any] = {"role": self.role, "content": content}
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                fields[name] = getattr(self, name)
        if self.tool_calls:
            fields["tool_calls"] = [call.fields() for call in self.tool_calls]
        return fields | reasoning_fields(self.reasoning_content or self.reasoning, content)


class ChatFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A chat's ``midfill`` object; the fields of infilling are not for chats.

    Attributes:
        method: see ``MidfillFields`` of completions.
    """

    method: str | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """The body of POST /v1/chat/completions.

    ``chat_template_kwargs`` is vLLM's, SGLang's and llama.cpp's addition.
    """

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    midfill: ChatFields | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, msgspec.Raw] | None = None
    # Declared so that they are refused rather than ignored.
    suffix: msgspec.Raw | None = None
    functions: list[msgspec.Raw] | None = None
    response_format: dict[str, msgspec.Raw] | None = None


# Continue's provider for llama.cpp leaves out the version, as that server's own routes do.
CHAT_PATHS = ("/v1/chat/completions", "/chat/completions")


def chat_routes(service: ModelService, tenant_of: TenantOf) -> APIRouter:
    """Return the router of the endpoint."""
    router = APIRouter()

    @router.post(CHAT_PATHS[0], openapi_extra=body_reference(ChatRequest))
    @router.post(CHAT_PATHS[1], openapi_extra=body_reference(ChatRequest))
    async def chat_completions(
        request: Request, tenant: Annotated[str, Depends(tenant_of)]
    ) -> Response:
        """Generate the assistant's next message."""
        body = await read_json(request, ChatRequest, service.max_body_bytes)
        model = service.check_model(body.model)
        _refuse_unsupported(body)
        sampling, hints = _sampling(body, service), body.hints()
        check_message_count(len(body.messages))
        messages = [message.fields() for message in body.messages]
        method = None if body.midfill is None else body.midfill.method
        check_method(method, service)
        fields = _template_fields(body, service)
        source = PromptSource(
            messages=messages,
            template_fields=fields,
            tenant=tenant,
            method=method,
            prediction=body.predicted_text,
        )
        prompts = await service.encode([source])
        generation = service.generate(
            GenerationRequest(prompts, sampling, tenant, bool(body.stream), hints=hints)
        )
        answer = _ChatResponse(body, generation, model)
        if body.stream:
            return EventStream(answer.events())
        return json_response(await answer.whole())

    return router


def check_method(method: str | None, service: ModelService) -> None:
    """Refuse a method that doesn't exist, or that requests may not choose."""
    if method is None:
        return
    try:
        service.check_method(method)
    except InvalidRequestError as error:
        field = "midfill.method"
        raise InvalidRequestError(f"{field}: {error}", param=field) from None


def _refuse_unsupported(body: ChatRequest) -> None:
    if not body.messages:
        raise InvalidRequestError("messages is empty", param="messages")
    if body.suffix is not None and bytes(body.suffix) != b"null":
        raise InvalidRequestError(
            "suffix is not for chats; use /v1/completions to fill in", param="suffix"
        )
    if body.functions:
        raise InvalidRequestError("functions are not supported; use tools", param="functions")
    kind = (body.response_format or {}).get("type")
    if kind is not None and bytes(kind) != b'"text"':
        raise InvalidRequestError(
            "response_format is not supported, other than type text", param="response_format"
        )


def _template_fields(body: ChatRequest, service: ModelService) -> dict[str, Any]:
    """Return what the chat template may read beside the messages."""
    fields: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        fields |= effort_fields(service, body.reasoning_effort, "reasoning_effort")
    fields |= check_template_kwargs(body.chat_template_kwargs)
    if body.tools and body.tool_choice != "none":
        check_tools(service)
        if body.tool_choice not in (None, "auto"):
            raise InvalidRequestError(
                "tool_choice must be auto or none; a call can't be enforced", param="tool_choice"
            )
        fields["tools"] = [tool.fields() for tool in body.tools]
    return fields


def _sampling(body: ChatRequest, service: ModelService) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs = true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    # Without a limit a chat's answer may fill the context; the engine ends it there.
    sampling = body.sampling(default_max_tokens=service.context, logprobs=logprobs)
    spelled = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        sampling = msgspec.structs.replace(sampling, max_tokens=body.max_completion_tokens)
        spelled["max_tokens"] = "max_completion_tokens"
    check_sampling(sampling, service.tokenizer.vocab_size, spelled)
    body.wants_usage()
    return sampling


class _ChatResponse:
    """One response, whole or as a stream of chunks."""

    def __init__(self, body: ChatRequest, generation: Generation, model: str) -> None:
        self._logprobs = bool(body.logprobs)
        self._usage = body.wants_usage()
        self._generation = generation
        self._call_ids: dict[int, str] = {}  # of each answer: its calls' ids begin with it
        self._head: dict[str, object] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> dict[str, object]:
        """Return the whole response."""
        (result,) = await self._generation.whole()
        choices = [
            {
                "index": index,
                "message": self._message(index, answer),
                "logprobs": self._logprobs_object(answer.logprobs),
                "finish_reason": _finish_reason(answer.finish_reason, calls=bool(answer.calls)),
            }
            for index, answer in enumerate(result.answers)
        ]
        return {**self._head, "choices": choices, "usage": usage_object(self._generation.usage)}

    async def events(self) -> AsyncGenerator[dict[str, object], None]:
        """Yield the response in chunks; the first of each choice holds the role."""
        started: set[int] = set()
        async for _, delta in self._generation.deltas():
            if delta.index not in started:
                started.add(delta.index)
                yield self._chunk(delta.index, {"role": "assistant", "content": ""})
            fields = self._delta(delta)
            calls = delta.index in self._call_ids
            finish_reason = _finish_reason(delta.finish_reason, calls=calls)
            logprobs = self._logprobs_object(delta.logprobs)
            yield self._chunk(delta.index, fields, logprobs, finish_reason)
        if self._usage:
            yield {**self._head, "choices": [], "usage": usage_object(self._generation.usage)}

    def _message(self, index: int, answer: Answer) -> dict[str, object]:
        """Return a whole message."""
        content = answer.text or (None if answer.calls else "")
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        message |= _reasoning(answer.reasoning)
        if answer.calls:
            message["tool_calls"] = [
                self._call(index, number, call) for number, call in enumerate(answer.calls)
            ]
        return message

    def _delta(self, delta: AnswerDelta) -> dict[str, object]:
        """Return what is new in a message."""
        fields: dict[str, object] = {"content": delta.text} if delta.text else {}
        fields |= _reasoning(delta.reasoning)
        if delta.calls:
            fields["tool_calls"] = [
                {"index": piece.index}
                | (
                    self._call(delta.index, piece.index, piece)
                    if piece.name
                    else {"function": {"arguments": piece.arguments}}
                )
                for piece in delta.calls
            ]
        return fields

    def _call(self, index: int, number: int, call: Call | CallPiece) -> dict[str, object]:
        """Return a call, or its first piece."""
        call_id = self._call_ids.setdefault(index, f"call_{uuid.uuid4().hex[:24]}")
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"{call_id}-{number}", "type": "function", "function": function}

    def _chunk(
        self,
        index: int,
        delta: dict[str, object],
        logprobs: dict[str, object] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, object]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk: dict[str, object] = {**self._head, "choices": [choice]}
        if self._usage:
            chunk["usage"] = None
        return chunk

    def _logprobs_object(self, reports: Sequence[TokenLogprob]) -> dict[str, object] | None:
        if not self._logprobs:
            return None
        return {"content": [logprob_object(report) for report in reports], "refusal": None}


def _reasoning(text: str) -> dict[str, object]:
    """Return the fields of reasoning: DeepSeek's, which llama.cpp has, and vLLM's later one."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _finish_reason(reason: str | None, *, calls: bool) -> str | None:
    """Return why an answer ended, as chats have it: one that calls functions waits for them."""
    return "tool_calls" if calls and reason == "stop" else reason


def model_routes(service: ModelService, tenant_of: TenantOf) -> APIRouter:
    """Return the router of the list and of its entries: one per name of a model."""
    router = APIRouter(dependencies=[Depends(tenant_of)])

    @router.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [_card(model) for model in service.listed()]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, object]:
        for listed in service.listed():
            if listed.name == name:
                return _card(listed)
        raise service.unknown_model(name)

    return router


def _card(model: ListedModel) -> dict[str, object]:
    """Describe a name; of a model that isn't in memory, only what is known without it."""
    card = {"id": model.name, "object": "model", "created": model.created, "owned_by": "midfill"}
    service = model.service
    if service is None:
        return {**card, "root": model.name, "midfill": {"loaded": False}}
    # "root" and "max_model_len" are vLLM's names for the model itself, and for its context.
    return {
        **card,
        "root": service.name,
        "max_model_len": service.context,
        "midfill": {"loaded": True, **_sentinels(service.fim_format)},
    }


def _sentinels(format: FimFormat | None) -> dict[str, object]:
    sentinels: dict[str, object] = {"sentinels": format is not None}
    if format is not None and format.order == "psm" and format.middle is not None:
        parts = (format.prefix, format.suffix, format.middle)
        sentinels["fim_tokens"] = [part.text for part in parts]
    return sentinels


DIALECT = Dialect(routes=chat_routes, bodies=(ChatRequest,), queued=CHAT_PATHS)
