"""GenerationResult and AnswerStream: what Python programs get, whole or piece by piece."""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

from midfill.frontend.answer import AnswerDelta, TokenLogprob
from midfill.frontend.prompts import LayoutReport
from midfill.frontend.response import Response, Usage


@dataclass(frozen=True)
class GeneratedAnswer:
    """One answer.

    Attributes:
        text: without the prompt.
        token_ids: its tokens, the one that ended it and those of healed bytes included.
        finish_reason: "stop" or "length".
        stop_reason: the stop string or stop token id that ended it, if one did.
        logprobs: one entry a token of the text; empty when not asked for.
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
        usage: what they cost; ``usage.cached_tokens`` of the prompt were not computed.
        layout: how the prompt was laid out; None for token ids.
    """

    answers: tuple[GeneratedAnswer, ...]
    usage: Usage
    layout: LayoutReport | None

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.answers[0].text


class AnswerStream(Iterator[AnswerDelta]):
    """The answers to one prompt, piece by piece. Closing it ends the request."""

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
        """What it has cost so far."""
        return self._response.usage

    @property
    def layout(self) -> LayoutReport | None:
        """How the prompt was laid out; None for token ids."""
        return self._response.prompt.report

    def result(self) -> GenerationResult:
        """Wait for the rest; then the whole answers, pieces that were read before included.

        Of a stream that was closed early: what had been read.
        """
        for _ in self:
            pass
        return whole_answers(self._response, self._read)

    def close(self) -> None:
        """End the request; nothing more comes."""
        self._deltas.close()


def whole_answers(response: Response, deltas: Iterable[AnswerDelta]) -> GenerationResult:
    """The answers to one prompt, put together from all their pieces."""
    pieces: dict[int, list[AnswerDelta]] = {}
    for delta in deltas:
        pieces.setdefault(delta.index, []).append(delta)
    return GenerationResult(
        answers=tuple(_join(pieces[index]) for index in sorted(pieces)),
        usage=response.usage,
        layout=response.prompt.report,
    )


def _join(deltas: list[AnswerDelta]) -> GeneratedAnswer:
    return GeneratedAnswer(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        finish_reason=deltas[-1].finish_reason or "",
        stop_reason=deltas[-1].stop_reason,
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
    )
