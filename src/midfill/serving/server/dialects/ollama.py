"""Ollama's POST /api/generate and POST /api/chat, and what it tells of its models.

A ``suffix`` that is not empty makes an infill request of /api/generate. Without one, and without
``raw``, the prompt is what a user says in a chat; only a prompt that is the model's own FIM
template, filled in, is sent as such: editor plugins send these.

Clients decide by POST /api/show whether to send a ``suffix``: Continue if ``template`` uses
``.Suffix``, others if ``insert`` is among the capabilities.
"""

import datetime
import hashlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from midfill.errors import GenerationError, InvalidRequestError
from midfill.frontend.answer import Answer, AnswerDelta
from midfill.frontend.channels import Call, CallPiece
from midfill.frontend.generation import Usage
from midfill.frontend.prompt import PromptSource, check_message_count
from midfill.frontend.sampling import SamplingParams, check_sampling
from midfill.infill.formats import FimFormat
from midfill.infill.request import InfillRequest
from midfill.serving.server.bodies import body_reference, json_response, read_json
from midfill.serving.server.dialects.chat_fields import (
    Tool,
    check_tools,
    effort_fields,
    reasoning_fields,
    thinking_fields,
)
from midfill.serving.server.dialects.dialect import Dialect, TenantOf
from midfill.serving.server.dialects.logprobs import logprob_object
from midfill.serving.server.request import (
    Generation,
    GenerationRequest,
    Timings,
    limited_to_a_hole,
)
from midfill.serving.server.responses import ApiError, JsonLines, error_message
from midfill.serving.server.service import ListedModel, ModelService
from midfill.version import __version__

_LATEST = ":latest"  # the tag that a name without one has
_NANOSECONDS = 1e9
_NAMES = {"max_tokens": "options.num_predict", "logprobs": "top_logprobs"}

# Of the API that is spoken here; clients refuse to talk to versions that are too old for them.
_API_VERSION = "0.13.0"


class Options(msgspec.Struct, kw_only=True):
    """A request's ``options``, with Ollama's defaults.

    Ignored are those that concern loading a model (``num_ctx``), and what midfill lacks: mirostat,
    and ``repeat_penalty``, which there looks at the last tokens only.
    """

    num_predict: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: list[str] | None = None


class OllamaFields(msgspec.Struct, kw_only=True):
    """Fields of /api/generate and /api/chat; null always means the default."""

    model: str
    stream: bool | None = None
    options: Options | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    think: bool | str | None = None
    format: Any = None  # refused rather than ignored, if it asks for something

    @property
    def unloads(self) -> bool:
        """Whether a request without a prompt asks to unload the model, which stays loaded here."""
        return self.keep_alive in (0, "0", "0s", "0m")

    def template_fields(self, service: ModelService) -> dict[str, Any]:
        """Return what the chat template may read beside the messages."""
        if isinstance(self.think, str):
            return effort_fields(service, self.think, "think")
        return {} if self.think is None else thinking_fields(service, thinks=self.think)

    def sampling(self, service: ModelService) -> SamplingParams:
        """Return the sampling parameters, checked.

        Raises:
            InvalidRequestError: an option is out of range, or what is asked for is not supported.
        """
        if self.format:
            raise InvalidRequestError("format is not supported", param="format")
        if self.think and not service.has_reasoning:
            raise InvalidRequestError(
                "think is not supported for this model: it doesn't keep reasoning apart",
                param="think",
            )
        given = self.options or Options()
        limit = given.num_predict or 0
        asked: dict[str, Any] = {
            "temperature": 0.8 if given.temperature is None else given.temperature,
            "top_k": 40 if given.top_k is None else max(given.top_k, 0),
            "top_p": 0.9 if given.top_p is None else given.top_p,
            "seed": None if given.seed == -1 else given.seed,
            "stop": tuple(text for text in given.stop or () if text),
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }
        for name in ("min_p", "typical_p", "presence_penalty", "frequency_penalty"):
            asked[name] = getattr(given, name)
        sampling = SamplingParams(
            max_tokens=limit if limit > 0 else service.context,
            **{name: value for name, value in asked.items() if value is not None},
        )
        same = ("temperature", "top_p", "min_p", "typical_p", "seed", "stop")
        names = {**_NAMES, **{name: f"options.{name}" for name in same}}
        check_sampling(sampling, service.tokenizer.vocab_size, names)
        return sampling


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

    def message(
        self, text: str, thinking: str, calls: Sequence[dict[str, object]]
    ) -> dict[str, object]:
        """Return the fields that hold an answer: text, and reasoning if there is any."""
        return {"response": text, **({"thinking": thinking} if thinking else {})}

    def source(self, service: ModelService, tenant: str) -> PromptSource:
        """Return what the prompt is made of."""
        if self.template:
            raise InvalidRequestError("template is not supported", param="template")
        text = InfillRequest(
            prefix=self.prompt or "",
            suffix=self.suffix or "",
            raw=not self.suffix,
            tenant=tenant,
        )
        if self.raw:
            return PromptSource(text=text)
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": text.prefix}]
        fields = self.template_fields(service)
        return PromptSource(text=text, messages=messages, template_fields=fields, tenant=tenant)


class CalledFunction(msgspec.Struct, kw_only=True):
    """What a message called."""

    name: str
    arguments: dict[str, Any] = {}


class ToolCall(msgspec.Struct, kw_only=True):
    """A call in a message."""

    function: CalledFunction


class ChatTurn(msgspec.Struct, kw_only=True):
    """A message of a chat."""

    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None

    def fields(self) -> dict[str, Any]:
        """Return what the template sees, in the spelling of OpenAI's messages."""
        content = self.content or ""
        fields: dict[str, Any] = {"role": self.role.lower(), "content": content}
        if self.tool_name is not None:
            fields["name"] = self.tool_name
        if self.tool_calls:
            fields["tool_calls"] = [
                {"type": "function", "function": msgspec.to_builtins(call.function)}
                for call in self.tool_calls
            ]
        return fields | reasoning_fields(self.thinking, content)


class ChatBody(OllamaFields, kw_only=True):
    """The body of POST /api/chat."""

    messages: list[ChatTurn] | None = None
    tools: list[Tool] | None = None

    @property
    def only_loads(self) -> bool:
        """Whether there is nothing to answer: the request is to load the model."""
        return not self.messages

    def message(
        self, text: str, thinking: str, calls: Sequence[dict[str, object]]
    ) -> dict[str, object]:
        """Return the field that holds an answer: text, reasoning, and calls if there are any."""
        beside = {"thinking": thinking, "tool_calls": calls}
        filled = {name: value for name, value in beside.items() if value}
        return {"message": {"role": "assistant", "content": text, **filled}}

    def source(self, service: ModelService, tenant: str) -> PromptSource:
        """Return what the prompt is made of."""
        messages = self.messages or ()
        check_message_count(len(messages))
        return PromptSource(
            messages=[turn.fields() for turn in messages],
            template_fields=self.template_fields(service),
            tenant=tenant,
        )

    def template_fields(self, service: ModelService) -> dict[str, Any]:
        """Return what the chat template may read beside the messages."""
        tools = {"tools": [tool.fields() for tool in self.tools]} if self.tools else {}
        return super().template_fields(service) | tools

    def sampling(self, service: ModelService) -> SamplingParams:
        """Return the sampling parameters, checked; tools are, too."""
        if self.tools:
            check_tools(service)
        return super().sampling(service)


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
        prompts = await service.encode([body.source(service, tenant)])
        if prompts[0].infilling and (body.options or Options()).num_predict is None:
            sampling = limited_to_a_hole(sampling)
        if isinstance(body, GenerateBody) and body.suffix:
            sampling = service.for_editor(sampling)
        streamed = body.stream is not False
        generation = service.generate(GenerationRequest(prompts, sampling, tenant, streamed))
        if streamed:
            return JsonLines(_lines(body, generation), error_body)
        return json_response(await _whole(body, generation))

    router.routes.extend(model_routes(service, tenant_of).routes)
    return router


async def _lines(
    body: GenerateBody | ChatBody, generation: Generation
) -> AsyncGenerator[object, None]:
    """Yield the answer in pieces; the last one has no text."""
    calls: list[CallPiece] = []
    async for _, delta in generation.deltas():
        calls += delta.calls
        if delta.text or delta.reasoning or delta.logprobs:
            piece = _message(body, delta.text, delta.reasoning) | {"done": False}
            yield piece | _logprobs(delta)
        if delta.finish_reason is not None:
            if called := _calls(Call.join(calls), delta.finish_reason):
                yield _message(body, "", calls=called) | {"done": False}
            yield _message(body, "") | _end(delta.finish_reason, generation)


async def _whole(body: GenerateBody | ChatBody, generation: Generation) -> dict[str, object]:
    """Return the whole answer."""
    (result,) = await generation.whole()
    (answer,) = result.answers
    called = _calls(answer.calls, answer.finish_reason)
    message = _message(body, answer.text, answer.reasoning, called)
    return message | _end(answer.finish_reason, generation) | _logprobs(answer)


def _message(
    body: GenerateBody | ChatBody,
    text: str,
    thinking: str = "",
    calls: Sequence[dict[str, object]] = (),
) -> dict[str, object]:
    head = {"model": body.model, "created_at": timestamp()}
    return {**head, **body.message(text, thinking, calls)}


def _calls(calls: Iterable[Call], finish_reason: str) -> list[dict[str, object]]:
    """Return an answer's calls; their arguments are values here, and not text.

    Raises:
        GenerationError: the model has written others, unless the answer was cut off.
    """
    objects: list[dict[str, object]] = []
    for call in calls:
        try:
            arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            if finish_reason == "length":
                break
            raise GenerationError(
                f"the model calls {call.name} with arguments that are no JSON object"
            ) from None
        objects.append({"function": {"name": call.name, "arguments": arguments}})
    return objects


def _end(finish_reason: str, generation: Generation) -> dict[str, object]:
    """Return the fields of a response that is complete."""
    cost = metrics(generation.usage, generation.timings)
    return {"done": True, "done_reason": finish_reason, **cost}


def _logprobs(answer: AnswerDelta | Answer) -> dict[str, object]:
    return (
        {"logprobs": [logprob_object(report) for report in answer.logprobs]}
        if answer.logprobs
        else {}
    )


def check_name(service: ModelService, name: str) -> None:
    """Refuse another model's name; the tag ``latest`` may be left out or not.

    Raises:
        ApiError: 404.
    """
    service.check_model(name if name in service.names else name.removesuffix(_LATEST))


def with_tag(name: str) -> str:
    """Return a model's name with a tag."""
    return name if ":" in name else name + _LATEST


def timestamp(seconds: float | None = None) -> str:
    """Return a time (now, if none is given) as Ollama writes it."""
    zone = datetime.UTC
    moment = (
        datetime.datetime.now(zone)
        if seconds is None
        else datetime.datetime.fromtimestamp(seconds, zone)
    )
    return moment.isoformat().replace("+00:00", "Z")


def metrics(usage: Usage, timings: Timings) -> dict[str, int]:
    """Return what a request cost; durations are in nanoseconds."""
    return {
        "total_duration": int((timings.prompt + timings.generation) * _NANOSECONDS),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": int(timings.prompt * _NANOSECONDS),
        "eval_count": usage.completion_tokens,
        "eval_duration": int(timings.generation * _NANOSECONDS),
    }


def error_body(error: ApiError) -> dict[str, object]:
    """Return Ollama's shape of an error."""
    return {"error": error_message(error)}


class ShowBody(msgspec.Struct, kw_only=True):
    """The body of POST /api/show; ``name`` is the older spelling of ``model``."""

    model: str | None = None
    name: str | None = None


def model_routes(service: ModelService, tenant_of: TenantOf) -> APIRouter:
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
        """List the models by each of their names."""
        return json_response({"models": [_card(model) for model in service.listed()]})

    @router.get("/api/ps")
    async def running() -> Response:
        """List the models in memory, each once."""
        cards = [
            {
                **_card(model),
                "size_vram": 0,
                "context_length": model.service.context,
                "expires_at": "9999-12-31T23:59:59Z",
            }
            for model in service.listed()
            if model.service is not None and model.name == model.service.name
        ]
        return json_response({"models": cards})

    @router.post("/api/show", openapi_extra=body_reference(ShowBody))
    async def show(request: Request) -> Response:
        """Describe the model."""
        body = await read_json(request, ShowBody, service.max_body_bytes, any_content_type=True)
        check_name(service, body.model or body.name or "")
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
                "capabilities": _capabilities(service),
                "modified_at": timestamp(service.created),
            }
        )

    return router


def _capabilities(service: ModelService) -> list[str]:
    having = {
        "completion": True,
        "insert": service.fim_format is not None,
        "tools": service.has_calls,
        "thinking": service.has_reasoning,
    }
    return [name for name, has in having.items() if has]


def _card(model: ListedModel) -> dict[str, Any]:
    return {
        "name": with_tag(model.name),
        "model": with_tag(model.name),
        "modified_at": timestamp(model.created),
        "size": model.bytes,
        "digest": hashlib.sha256(model.name.encode()).hexdigest(),
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


DIALECT = Dialect(
    routes=routes,
    bodies=(GenerateBody, ChatBody, ShowBody),
    error_body=error_body,
    prefix="/api/",
    queued=("/api/generate", "/api/chat"),
)
