"""POST /v1/completions, as vLLM, SGLang, midfill and others serve it."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from midfill.engine.validation import MAX_ANSWERS
from midfill.serving.gateway.calls import Call, Piece, UpstreamFailedError
from midfill.serving.gateway.start_grammars import start_regex

OpenAIKind = Literal["vllm", "sglang", "midfill", "openai"]

_FIELDS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
# Known to vLLM, SGLang and midfill only; with these values they change nothing.
_EXTRA = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": False}


class CompletionsApi:
    """See ``UpstreamApi``.

    Args:
        kind: which server it is; what only some know is sent to these.
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
        body |= {field: getattr(sampling, field) for field in _FIELDS}
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
        for field, off in _EXTRA.items():
            if getattr(sampling, field) != off:
                body[field] = getattr(sampling, field)
        if sampling.stop_token_ids:
            body["stop_token_ids"] = list(sampling.stop_token_ids)
        return body | self._own(call)

    def _own(self, call: Call) -> dict[str, Any]:
        """Return what only this kind of server knows."""
        if self._kind == "midfill":
            return {"midfill": {"layout": "verbatim", "trim": False}, "return_token_ids": True}
        own: dict[str, Any] = {}
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
        """Yield what a streamed event says; see ``UpstreamApi``."""
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
            yield _piece(choice)


def _piece(choice: object) -> Piece:
    if not isinstance(choice, Mapping) or not isinstance(choice.get("text"), str):
        raise UpstreamFailedError("sent a choice without text; is it an OpenAI-style API?")
    ids = choice.get("token_ids")
    token_ids = tuple(ids) if isinstance(ids, list) else ()
    reason = choice.get("finish_reason")
    if reason not in (None, "stop", "length", "content_filter"):
        raise UpstreamFailedError(f"ended the answer with finish_reason {str(reason)[:40]!r}")
    return Piece(
        index=whole(choice.get("index")) or 0,
        text=choice["text"],
        token_ids=token_ids if all(isinstance(each, int) for each in token_ids) else (),
        finish_reason="stop" if reason == "content_filter" else reason,
    )


def whole(value: object) -> int | None:
    """Return a whole number that is no nonsense; None for anything else."""
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**40
    return value if fits and isinstance(value, int) else None


def error_text(error: object) -> str:
    """Return what an upstream's error object says, on one line."""
    message = error.get("message", error) if isinstance(error, Mapping) else error
    text = " ".join(str(message).split())
    return text if len(text) <= 300 else f"{text[:300]}..."
