"""Results: answers as llama.cpp's server reports them, with timings and settings."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from math import inf
from typing import Any

import msgspec

from midfill.frontend.answer import AnswerDelta, Candidate, TokenLogprob
from midfill.frontend.generation import GeneratedAnswer, whole_answers
from midfill.frontend.prompt import Prompt
from midfill.frontend.response import Usage
from midfill.frontend.sampling import SamplingParams
from midfill.serving.server.dialects.llama_cpp_fields import LlamaCppFields
from midfill.serving.server.dialects.openai_fields import floor_logprob
from midfill.serving.server.generation import Generation, Timings
from midfill.serving.server.service import ModelService

_SLOT = 0  # midfill has no slots for clients to choose from


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
        """Run the generation; return its one result, or a list of them."""
        results = [
            self._final(response.prompt, place * self._sampling.n + index, answer, generation)
            for place, (response, result) in enumerate(
                zip(generation.responses, await generation.whole(), strict=True)
            )
            for index, answer in enumerate(result.answers)
        ]
        return results[0] if len(results) == 1 else results

    def of_prefill(self, prompts: Sequence[Prompt]) -> object:
        """Return the result, or results, of a request that only computes its prompts."""
        answer = GeneratedAnswer("", (), "length", None, ())
        results = [
            self._selected(prompt, place, answer, Usage(len(prompt.token_ids)), Timings(0, 0))
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
                    "tokens_predicted": sum(len(one.token_ids) for one in written[number]),
                    "tokens_evaluated": response.usage.prompt_tokens,
                }
            if delta.finish_reason is not None:
                (answer,) = whole_answers(response, written[number]).answers
                yield self._final(response.prompt, number, answer, generation)

    def _final(
        self, prompt: Prompt, number: int, answer: GeneratedAnswer, generation: Generation
    ) -> object:
        usage = generation.responses[number // self._sampling.n].usage
        return self._selected(prompt, number, answer, usage, generation.timings)

    def _selected(
        self, prompt: Prompt, number: int, answer: GeneratedAnswer, usage: Usage, timings: Timings
    ) -> object:
        """Return a result with the fields that the client selected: all, if it selected none."""
        result = self._result(prompt, number, answer, usage, timings)
        return _select(result, self._body.response_fields or [])

    def _result(
        self, prompt: Prompt, number: int, answer: GeneratedAnswer, usage: Usage, timings: Timings
    ) -> dict[str, Any]:
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
            result["completion_probabilities"] = [_probabilities(one) for one in answer.logprobs]
        return result

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


def _probabilities(report: TokenLogprob) -> dict[str, Any]:
    return {**_candidate(report.chosen), "top_logprobs": [_candidate(one) for one in report.top]}


def _candidate(one: Candidate) -> dict[str, Any]:
    return {
        "id": one.token_id,
        "token": one.text,
        "bytes": list(one.bytes),
        "logprob": floor_logprob(one.logprob),
    }


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
