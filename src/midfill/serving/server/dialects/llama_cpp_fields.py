"""What llama.cpp's generation endpoints share: sampling fields, results, the shape of errors.

Names, defaults and meanings are those of its server (tools/server). Ignored are unknown fields,
``id_slot``, ``cache_prompt``, ``t_max_prompt_ms`` and samplers that midfill lacks: mirostat, DRY,
XTC, top-n-sigma, dynamic temperature, and ``repeat_penalty``, which there looks at the last 64
tokens only. Grammars are refused: an answer that ignored one would be wrong.
"""

from math import inf
from typing import Any

import msgspec

from midfill.errors import InvalidRequestError
from midfill.frontend.post_processing import PostProcessing
from midfill.frontend.sampling import MAX_LOGPROBS, SamplingParams, check_sampling
from midfill.serving.server.errors import ApiError, error_message
from midfill.serving.server.service import ModelService

_SAMPLERS = ("top_k", "typ_p", "top_p", "min_p", "temperature")
_SHORT_SAMPLERS = {
    "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p", "t": "temperature", "i": "infill",
}  # fmt: skip
_TYPICAL_NAMES = ("typ_p", "typical_p", "typical", "typ")
# llama.cpp's sampler "infill" drops tokens below this probability, and the most likely one of the
# others is nearly always the answer's. One answer gets it always, and several differ.
_INFILL_MIN_P = 0.2
_NAMES = {
    "max_tokens": "n_predict", "n": "n_cmpl", "logprobs": "n_probs", "min_indent": "n_indent",
}  # fmt: skip
_ERROR_TYPES = {
    401: "authentication_error", 404: "not_found_error", 429: "unavailable_error",
    500: "server_error", 501: "not_supported_error", 503: "unavailable_error",
}  # fmt: skip


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
        """The samplers that are applied."""
        names = _SAMPLERS if self.samplers is None else self.samplers
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
            raise error.renamed({**_NAMES, "max_seconds": "t_max_predict_ms"}) from None
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
        check_sampling(sampling, service.tokenizer.vocab_size, _NAMES)
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
        biases: dict[int, float] = {}
        for key, value in given.items() if isinstance(given, dict) else given:
            number = -100.0 if value is False else float(value)
            if isinstance(key, int) or key.isdecimal():
                biases[int(key)] = number
            else:
                biases.update(dict.fromkeys(service.tokenizer.encode(key), number))
        return biases


def error_body(error: ApiError) -> dict[str, object]:
    """Return llama.cpp's shape of an error."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    if error.code == "context_length_exceeded":
        kind = "exceed_context_size_error"
    return {"error": {"code": error.status, "message": error_message(error), "type": kind}}
