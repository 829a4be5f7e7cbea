"""What is asked of an upstream and what comes back, and the APIs that express it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from midfill.engine.request import NO_REQUEST_HINTS, EngineSamplingParams, RequestHints
from midfill.engine.validation import MAX_ANSWERS
from midfill.errors import MidfillError

UpstreamPrompt = str | list[int]

_REGEX_SPECIAL = re.compile(r"[.^$*+?{}\[\]\\|()/]")
_CONTROL = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
OpenAIKind = Literal["vllm", "sglang", "midfill", "openai"]
_OPENAI_FIELDS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
# Known to vLLM, SGLang and midfill only; with these values they change nothing.
_EXTRA_FIELDS = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": False}
_LLAMA_CPP_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
)
_LLAMA_CPP_REASONS = {"eos": "stop", "word": "stop", "limit": "length"}


class UpstreamFailedError(MidfillError):
    """An upstream can't be reached, or doesn't answer as it should; another one may.

    Attributes:
        busy: whether it is only overloaded.
        client_made: whether it may be a client's doing, who has made what was sent.
    """

    def __init__(self, message: str, *, busy: bool = False, client_made: bool = False) -> None:
        super().__init__(message)
        self.busy = busy
        self.client_made = client_made


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request to an upstream.

    Attributes:
        model: the upstream's name of it.
        prompt: text, in which the upstream parses special tokens, or token ids.
        sampling: how to answer; ``stop_token_ids`` are the model's own.
        answers: how many; ``sampling.n`` or fewer.
        stop: texts of special tokens that end an answer and whose ids are unknown.
        cache_salt: requests with different ones share no KV, where the upstream knows of it; "" for
            all who may.
        begins_with: what the upstream has to make the answer begin with, if it can.
        prediction: what the answer will probably be; "" if nothing is known. Only midfill drafts
            it.
        hints: for the upstream's scheduler. Only midfill's has the same: vLLM refuses priorities
            unless it is started for them, and SGLang's mean the opposite.
    """

    model: str
    prompt: UpstreamPrompt
    sampling: EngineSamplingParams
    answers: int = 1
    stop: tuple[str, ...] = ()
    cache_salt: str = ""
    begins_with: str = ""
    prediction: str = ""
    hints: RequestHints = NO_REQUEST_HINTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What is new in one answer.

    Attributes:
        index: which of the call's answers; None for what concerns all of them.
        text: new text.
        token_ids: new tokens, where the upstream names them.
        finish_reason: "stop" or "length" at the answer's end.
        prompt_tokens, cached_tokens, completion_tokens: its count so far, over all answers.
    """

    index: int | None = None
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RelayedEvent:
    """What an upstream says on a request that is passed on as it is.

    Attributes:
        body: JSON on one line.
        prompt_tokens, completion_tokens: what it says that the answers cost so far.
    """

    body: msgspec.Raw
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _RelayedBody(msgspec.Struct):
    error: Any = None
    usage: Any = None


_decode_relayed = msgspec.json.Decoder(_RelayedBody).decode


def relayed_event(data: bytes) -> RelayedEvent:
    """Return what an upstream has sent.

    Raises:
        UpstreamFailedError: it is no JSON object, or says that the upstream has failed.
    """
    try:
        body = _decode_relayed(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise UpstreamFailedError("sent an event that is no JSON object") from None
    if body.error is not None:
        raise UpstreamFailedError(
            f"failed on the request: {error_text(body.error)}", client_made=True
        )
    usage = body.usage if isinstance(body.usage, Mapping) else {}
    return RelayedEvent(
        msgspec.Raw(data), whole(usage.get("prompt_tokens")), whole(usage.get("completion_tokens"))
    )


def start_regex(text: str) -> str:
    """Return the regular expression of what begins with a text, for vLLM and SGLang."""
    escaped = _REGEX_SPECIAL.sub(lambda match: "\\" + match.group(), text)
    return _without_control(escaped) + r"[\s\S]*"


def start_grammar(text: str) -> str:
    """Return the grammar of what begins with a text, in llama.cpp's GBNF."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'root ::= "{_without_control(escaped)}" [^\\x00]*'


def _without_control(text: str) -> str:
    for character, escape in _CONTROL.items():
        text = text.replace(character, escape)
    return text


class CompletionsApi:
    """POST /v1/completions, as vLLM, SGLang, midfill and others serve it.

    Args:
        kind: which server it is; what only some know is sent to these.

    Attributes:
        path: where to POST.
        max_answers: maximum number of answers of one call.
        ends_by_token: whether an answer ends with the first of ``stop_token_ids``.
    """

    path = "/v1/completions"
    max_answers = MAX_ANSWERS
    ends_by_token = True

    def __init__(self, kind: OpenAIKind = "openai") -> None:
        self._kind = kind

    def body(self, call: Call) -> dict[str, Any]:
        """Return the JSON body to send."""
        sampling = call.sampling
        body: dict[str, Any] = {
            "model": call.model,
            "prompt": call.prompt,
            "max_tokens": sampling.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {field: getattr(sampling, field) for field in _OPENAI_FIELDS}
        if call.answers > 1:
            body["n"] = call.answers
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.logit_bias:
            body["logit_bias"] = {str(key): bias for key, bias in sampling.logit_bias.items()}
        if call.stop:
            body["stop"] = list(call.stop)
        if self._kind == "openai":
            return body
        for field, off in _EXTRA_FIELDS.items():
            if getattr(sampling, field) != off:
                body[field] = getattr(sampling, field)
        if sampling.stop_token_ids:
            body["stop_token_ids"] = list(sampling.stop_token_ids)
        return body | self._own(call)

    def _own(self, call: Call) -> dict[str, Any]:
        """Return what only this kind of server knows."""
        own: dict[str, Any]
        if self._kind == "midfill":
            own = {"midfill": {"layout": "verbatim", "trim": False}, "return_token_ids": True}
            if call.prediction:
                own["prediction"] = {"type": "content", "content": call.prediction}
            return own | _hint_fields(call.hints)
        own = {}
        if call.stop:
            own["skip_special_tokens"] = False  # or the text that ends the answer never shows
        if call.cache_salt:
            own["cache_salt"] = call.cache_salt
        if call.begins_with:
            own |= self._start_fields(call.begins_with)
        if self._kind == "vllm":
            own["return_token_ids"] = True
            own["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return own

    def _start_fields(self, text: str) -> dict[str, Any]:
        """Return what makes the answer begin with a text."""
        regex = start_regex(text)
        return (
            {"structured_outputs": {"regex": regex}} if self._kind == "vllm" else {"regex": regex}
        )

    def pieces(self, event: Mapping[str, Any]) -> Iterator[Piece]:
        """Yield what a streamed event says.

        Raises:
            UpstreamFailedError: it says that the upstream has failed, or makes no sense.
        """
        if (error := event.get("error")) is not None:
            raise UpstreamFailedError(f"failed on the request: {error_text(error)}")
        usage = event.get("usage")
        if isinstance(usage, Mapping):
            details = usage.get("prompt_tokens_details")
            yield Piece(
                prompt_tokens=whole(usage.get("prompt_tokens")),
                completion_tokens=whole(usage.get("completion_tokens")),
                cached_tokens=(
                    whole(details.get("cached_tokens")) if isinstance(details, Mapping) else None
                ),
            )
        choices = event.get("choices")
        if not isinstance(choices, list):
            raise UpstreamFailedError("sent an event without choices; is it an OpenAI-style API?")
        for choice in choices:
            yield _openai_piece(choice)


def _hint_fields(hints: RequestHints) -> dict[str, Any]:
    """Return the fields of midfill's own API that say the same."""
    fields = {
        "priority": hints.priority,
        "job_id": hints.program,
        "is_last_step": hints.last_step,
        "expected_tokens": hints.expected_tokens,
    }
    return {name: value for name, value in fields.items() if value}


def _openai_piece(choice: object) -> Piece:
    if not isinstance(choice, Mapping) or not isinstance(choice.get("text"), str):
        raise UpstreamFailedError("sent a choice without text; is it an OpenAI-style API?")
    reason = choice.get("finish_reason")
    if reason not in (None, "stop", "length", "content_filter"):
        raise UpstreamFailedError(f"ended the answer with finish_reason {str(reason)[:40]!r}")
    return Piece(
        index=whole(choice.get("index")) or 0,
        text=choice["text"],
        token_ids=_token_ids(choice.get("token_ids")),
        finish_reason="stop" if reason == "content_filter" else reason,
    )


def _token_ids(value: object) -> tuple[int, ...]:
    """Return ids of tokens; nothing if they are not all of them ids."""
    ids = tuple(value) if isinstance(value, list) else ()
    return ids if all(type(each) is int and 0 <= each < 2**31 for each in ids) else ()


def whole(value: object) -> int | None:
    """Return a whole number that is no nonsense; None for anything else."""
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**40
    return value if fits and isinstance(value, int) else None


def error_text(error: object) -> str:
    """Return what an upstream's error object says, on one line."""
    message = error.get("message", error) if isinstance(error, Mapping) else error
    text = " ".join(str(message)[:4000].split())
    text = text if len(text) <= 300 else f"{text[:300]}..."
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


class LlamaCppApi:
    """llama.cpp's POST /completion, as ``CompletionsApi`` has it. Its /infill can't express a cut.

    Each answer is a request of its own: they find the prompt cached.
    """

    path = "/completion"
    max_answers = 1
    ends_by_token = False

    def body(self, call: Call) -> dict[str, Any]:
        """Return the JSON body to send."""
        sampling = call.sampling
        body: dict[str, Any] = {field: getattr(sampling, field) for field in _LLAMA_CPP_FIELDS}
        body |= {
            "prompt": call.prompt,
            "n_predict": sampling.max_tokens,
            "stream": True,
            "cache_prompt": True,
            "return_tokens": True,
            "timings_per_token": True,  # they tell what was cached, also of answers that are cut
            "typical_p": sampling.typical_p,
            "repeat_penalty": sampling.repetition_penalty,
            "ignore_eos": sampling.ignore_eos,
            "stop": list(call.stop),
        }
        if sampling.logit_bias:
            body["logit_bias"] = [[key, bias] for key, bias in sampling.logit_bias.items()]
        if call.begins_with:
            body["grammar"] = start_grammar(call.begins_with)
        if sampling.seed is not None:
            body["seed"] = sampling.seed % 2**31
        return body

    def pieces(self, event: Mapping[str, Any]) -> Iterator[Piece]:
        """Yield what a streamed event says; see ``CompletionsApi``."""
        if (error := event.get("error")) is not None:
            raise UpstreamFailedError(f"failed on the request: {error_text(error)}")
        if not isinstance(event.get("content"), str):
            raise UpstreamFailedError("sent an event without content; is it llama.cpp's server?")
        ended = event.get("stop") is True
        reason = _LLAMA_CPP_REASONS.get(str(event.get("stop_type")), "stop") if ended else None
        timings = event.get("timings")
        cached = whole(timings.get("cache_n")) if isinstance(timings, Mapping) else None
        yield Piece(
            index=0,
            text=event["content"],
            token_ids=() if ended else _token_ids(event.get("tokens")),
            finish_reason=reason,
            prompt_tokens=whole(event.get("tokens_evaluated")),
            cached_tokens=cached,
            completion_tokens=whole(event.get("tokens_predicted")) if ended else None,
        )
