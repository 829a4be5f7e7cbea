"""llama.cpp's POST /completion. Its /infill can't express a cut."""

from collections.abc import Iterator, Mapping
from typing import Any

from midfill.serving.gateway.calls import Call, Piece, UpstreamFailedError
from midfill.serving.gateway.openai_api import error_text, whole
from midfill.serving.gateway.start_grammars import start_grammar

_SAME = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
_REASONS = {"eos": "stop", "word": "stop", "limit": "length"}


class LlamaCppApi:
    """See ``UpstreamApi``. Each answer is a request of its own: they find the prompt cached."""

    path = "/completion"
    max_answers = 1
    ends_by_token = False

    def body(self, call: Call) -> dict[str, Any]:
        """Return the JSON body to send."""
        sampling = call.sampling
        body: dict[str, Any] = {field: getattr(sampling, field) for field in _SAME}
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
        """Yield what a streamed event says; see ``UpstreamApi``."""
        if (error := event.get("error")) is not None:
            raise UpstreamFailedError(f"failed on the request: {error_text(error)}")
        if not isinstance(event.get("content"), str):
            raise UpstreamFailedError("sent an event without content; is it llama.cpp's server?")
        ids = event.get("tokens")
        ended = event.get("stop") is True
        tokens = tuple(ids) if isinstance(ids, list) and not ended else ()
        timings = event.get("timings")
        cached = whole(timings.get("cache_n")) if isinstance(timings, Mapping) else None
        yield Piece(
            index=0,
            text=event["content"],
            token_ids=tokens if all(isinstance(each, int) for each in tokens) else (),
            finish_reason=_REASONS.get(str(event.get("stop_type")), "stop") if ended else None,
            prompt_tokens=whole(event.get("tokens_evaluated")),
            cached_tokens=cached,
            completion_tokens=whole(event.get("tokens_predicted")) if ended else None,
        )
