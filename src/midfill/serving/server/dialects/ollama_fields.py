"""What Ollama's endpoints share: models' names, options, metrics, the shape of errors."""

import datetime
from typing import Any

import msgspec

from midfill.errors import InvalidRequestError
from midfill.frontend.answer import Candidate, TokenLogprob
from midfill.frontend.response import Usage
from midfill.frontend.sampling import SamplingParams, check_sampling
from midfill.serving.server.dialects.openai_fields import floor_logprob
from midfill.serving.server.errors import ApiError, error_message
from midfill.serving.server.generation import Timings
from midfill.serving.server.service import ModelService

_LATEST = ":latest"  # the tag that a name without one has
_NANOSECONDS = 1e9
_NAMES = {"max_tokens": "options.num_predict", "logprobs": "top_logprobs"}


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
    # Refused rather than ignored, if they ask for something.
    format: Any = None
    think: bool | str | None = None

    @property
    def unloads(self) -> bool:
        """Whether a request without a prompt asks to unload the model, which stays loaded here."""
        return self.keep_alive in (0, "0", "0s", "0m")

    def sampling(self, service: ModelService) -> SamplingParams:
        """Return the sampling parameters, checked.

        Raises:
            InvalidRequestError: an option is out of range, or what is asked for is not supported.
        """
        for name in ("format", "think"):
            if getattr(self, name):
                raise InvalidRequestError(f"{name} is not supported", param=name)
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


def logprob_object(report: TokenLogprob) -> dict[str, Any]:
    """Return a token's log probability with those of the likeliest tokens."""
    return {**_candidate(report.chosen), "top_logprobs": [_candidate(one) for one in report.top]}


def _candidate(one: Candidate) -> dict[str, Any]:
    return {"token": one.text, "logprob": floor_logprob(one.logprob), "bytes": list(one.bytes)}


def error_body(error: ApiError) -> dict[str, object]:
    """Return Ollama's shape of an error."""
    return {"error": error_message(error)}
