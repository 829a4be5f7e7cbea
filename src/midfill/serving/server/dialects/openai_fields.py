"""What OpenAI's generation endpoints share: sampling fields, usage, the midfill object.

Unknown fields are ignored, as by OpenAI and vLLM. Known fields that are not supported are refused
rather than silently ignored.
"""

from typing import Any

import msgspec

from midfill.errors import InvalidRequestError
from midfill.frontend.prompt import Prompt
from midfill.frontend.response import Usage
from midfill.frontend.sampling import SamplingParams

LOWEST_LOGPROB = -9999.0  # OpenAI's substitute for minus infinity, which JSON lacks


class StreamOptions(msgspec.Struct, kw_only=True):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """Fields of both endpoints; null always means the default.

    The fields from ``top_k`` to ``include_stop_str_in_output`` are vLLM's additions.
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
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None

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


def floor_logprob(logprob: float) -> float:
    """Return a log probability that JSON can hold."""
    return max(logprob, LOWEST_LOGPROB)
