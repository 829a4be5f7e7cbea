"""CompletionAnswer: the response to POST /v1/completions, whole or as a stream of chunks."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from midfill.frontend.answer import Candidate, TokenLogprob
from midfill.frontend.prompt_tokens import PromptToken
from midfill.frontend.token_report import TokenReport
from midfill.serving.server.dialects.openai_fields import (
    floor_logprob,
    midfill_object,
    usage_object,
)
from midfill.serving.server.generation import Generation


class CompletionAnswer:
    """One response.

    Args:
        generation: generates the answers, ``answers`` for each prompt.
        model: the name that the client called the model by.
        answers: how many answers per prompt to return; the best, if there are more.
        echo: whether each text begins with the prompt's.
        logprobs: whether to report log probabilities; of the echoed prompt, too.
        usage: whether a stream ends with the usage.
        token_ids: whether to name the answers' tokens.

    Attributes:
        reports: of the prompts' tokens, if the client wants them.
    """

    def __init__(
        self,
        generation: Generation,
        model: str,
        *,
        answers: int,
        echo: bool,
        logprobs: bool,
        usage: bool,
        token_ids: bool = False,
    ) -> None:
        self.reports: list[TokenReport | None] = []
        self._generation = generation
        self._answers = answers
        self._echo = echo
        self._logprobs = logprobs
        self._usage = usage
        self._token_ids = token_ids
        self._head: dict[str, object] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> dict[str, object]:
        """Return the whole response."""
        results = await self._generation.whole()
        choices: list[dict[str, Any]] = []
        for place, (response, result) in enumerate(
            zip(self._generation.responses, results, strict=True)
        ):
            echoed = response.prompt.text if self._echo else ""
            prompt = response.prompt_tokens if self._echo else ()
            for index, best in enumerate(response.best_answers(self._answers)):
                answer = result.answers[best]
                choice = self._choice(place, index, echoed + answer.text)
                choice["logprobs"] = self._logprobs_object(answer.logprobs, prompt, len(echoed))
                choice["finish_reason"] = answer.finish_reason
                choice["stop_reason"] = answer.stop_reason
                if self._token_ids:
                    choice["token_ids"] = answer.token_ids
                choices.append(choice)
        body = {**self._head, "choices": choices, "usage": usage_object(self._generation.usage)}
        self._add_midfill(body, choices)
        return body

    async def events(self) -> AsyncGenerator[dict[str, object], None]:
        """Yield the response in chunks; the first of each choice holds what is echoed."""
        started: set[int] = set()
        async for place, delta in self._generation.deltas():
            response = self._generation.responses[place]
            number = place * self._answers + delta.index
            echoed = response.prompt.text if self._echo else ""
            is_first = number not in started
            prompt = response.prompt_tokens if self._echo and is_first else ()
            choice = self._choice(place, delta.index, (echoed if is_first else "") + delta.text)
            choice["logprobs"] = self._logprobs_object(delta.logprobs, prompt, len(echoed))
            choice["finish_reason"] = delta.finish_reason
            choice["stop_reason"] = delta.stop_reason
            if self._token_ids:
                choice["token_ids"] = delta.token_ids
            chunk: dict[str, object] = {**self._head, "choices": [choice]}
            if is_first:
                started.add(number)
                self._add_midfill(chunk, [choice])
            if self._usage:
                chunk["usage"] = None
            yield chunk
        if self._usage:
            yield {**self._head, "choices": [], "usage": usage_object(self._generation.usage)}

    def _choice(self, place: int, index: int, text: str) -> dict[str, Any]:
        return {
            "index": place * self._answers + index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }

    def _add_midfill(self, body: dict[str, object], choices: Sequence[dict[str, Any]]) -> None:
        """Add how prompts were laid out, to each choice if there are several prompts."""
        responses = self._generation.responses
        targets: list[dict[str, Any]] = list(choices) if len(responses) > 1 else [body]
        for target in targets:
            place = target.get("index", 0) // self._answers
            found = midfill_object(responses[place].prompt, responses[place].usage)
            if found is not None:
                target["midfill"] = found
                if self.reports:
                    found["report"] = self.reports[place]

    def _logprobs_object(
        self, reports: Sequence[TokenLogprob], prompt: Sequence[PromptToken], start: int
    ) -> dict[str, object] | None:
        """Return OpenAI's ``logprobs``.

        Args:
            reports: of the answer's tokens.
            prompt: the prompt's tokens, if they are reported, too.
            start: where the answer's text starts.
        """
        if not self._logprobs:
            return None
        top: list[dict[str, float] | None] = [
            None if token.logprob is None else _by_text(token.top, token.text, token.logprob)
            for token in prompt
        ]
        return {
            "tokens": [token.text for token in prompt] + [one.chosen.text for one in reports],
            "token_logprobs": [
                None if token.logprob is None else floor_logprob(token.logprob) for token in prompt
            ]
            + [floor_logprob(one.chosen.logprob) for one in reports],
            "top_logprobs": top
            + [_by_text(one.top, one.chosen.text, one.chosen.logprob) for one in reports],
            "text_offset": [token.offset for token in prompt]
            + [start + one.offset for one in reports],
        }


def _by_text(top: Sequence[Candidate], text: str, logprob: float) -> dict[str, float]:
    """Return the log probabilities of the likeliest tokens, and of the token itself, by text."""
    found = {one.text: floor_logprob(one.logprob) for one in top}
    return {**found, text: floor_logprob(logprob)}
