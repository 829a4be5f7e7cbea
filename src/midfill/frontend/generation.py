"""GenerationResult and AnswerStream: what LLM returns, whole or piece by piece."""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

from midfill.frontend.answer import AnswerDelta, TokenLogprob
from midfill.frontend.prompt import LayoutReport
from midfill.frontend.prompt_tokens import PromptToken
from midfill.frontend.response import Response, Usage


@dataclass(frozen=True)
class GeneratedAnswer:
    """One answer.

    Attributes:
        text: the answer, without the prompt.
        token_ids: its tokens, including the one that ended it and those of healed bytes.
        finish_reason: "stop", "length", or why the caller gave it up.
        stop_reason: the stop string or stop token id that ended it, if one did.
        logprobs: one entry per token of the text; empty if not asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class GenerationResult:
    """All answers to one prompt.

    Attributes:
        answers: ``SamplingParams.n`` of them.
        usage: what they cost.
        layout: how the prompt was laid out; None for token ids.
        empty_probability: how probable an empty answer was; an upper bound where that is not above
            the threshold. None where there was no threshold.
        prompt_tokens: the prompt's own tokens with their log probabilities, if ``prompt_logprobs``
            asked for them.
    """

    answers: tuple[GeneratedAnswer, ...]
    usage: Usage
    layout: LayoutReport | None
    empty_probability: float | None = None
    prompt_tokens: tuple[PromptToken, ...] = ()

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.answers[0].text


class AnswerStream(Iterator[AnswerDelta]):
    """The answers to one prompt, piece by piece. Closing the stream ends the request."""

    def __init__(
        self, response: Response, deltas: Generator[tuple[int, AnswerDelta], None, None]
    ) -> None:
        self._response = response
        self._deltas = deltas
        self._read: list[AnswerDelta] = []

    def __next__(self) -> AnswerDelta:
        _, delta = next(self._deltas)
        self._read.append(delta)
        return delta

    @property
    def usage(self) -> Usage:
        """The cost so far."""
        return self._response.usage

    @property
    def layout(self) -> LayoutReport | None:
        """How the prompt was laid out; None for token ids."""
        return self._response.prompt.report

    def result(self) -> GenerationResult:
        """Read the rest and return the whole answers, including what was read before.

        If the stream was closed early, only what was read before.
        """
        for _ in self:
            pass
        return whole_answers(self._response, self._read)

    def close(self) -> None:
        """End the request; the stream yields nothing more."""
        self._deltas.close()


def whole_answers(response: Response, deltas: Iterable[AnswerDelta]) -> GenerationResult:
    """Return the answers to one prompt, put together from their pieces."""
    pieces: dict[int, list[AnswerDelta]] = {}
    for delta in deltas:
        pieces.setdefault(delta.index, []).append(delta)
    return GenerationResult(
        answers=tuple(_join(pieces[index]) for index in sorted(pieces)),
        usage=response.usage,
        layout=response.prompt.report,
        empty_probability=response.empty_probability,
        prompt_tokens=response.prompt_tokens,
    )


def _join(deltas: list[AnswerDelta]) -> GeneratedAnswer:
    return GeneratedAnswer(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        finish_reason=deltas[-1].finish_reason or "",
        stop_reason=deltas[-1].stop_reason,
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
    )
