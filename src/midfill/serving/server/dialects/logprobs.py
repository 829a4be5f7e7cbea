"""Log probabilities as the dialects of OpenAI, Ollama and llama.cpp write them."""

from typing import Any

from midfill.frontend.answer import Candidate, TokenLogprob

LOWEST_LOGPROB = -9999.0  # OpenAI's substitute for minus infinity, which JSON lacks


def floor_logprob(logprob: float) -> float:
    """Return a log probability that JSON can hold."""
    return max(logprob, LOWEST_LOGPROB)


def logprob_object(report: TokenLogprob, *, ids: bool = False) -> dict[str, Any]:
    """Return a token's log probability, with those of the most likely tokens, as chats have it.

    Args:
        report: of the token.
        ids: whether each token's id stands with it, as in llama.cpp.
    """

    def of(candidate: Candidate) -> dict[str, Any]:
        return {
            **({"id": candidate.token_id} if ids else {}),
            "token": candidate.text,
            "bytes": list(candidate.bytes),
            "logprob": floor_logprob(candidate.logprob),
        }

    return {**of(report.chosen), "top_logprobs": [of(other) for other in report.top]}
