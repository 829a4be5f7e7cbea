"""All answers to one prompt: while they are generated, piece by piece, and as a whole.

``PromptGeneration`` turns the engine's outputs into text; ``AnswerStream`` and ``GenerationResult``
are what ``LLM`` returns.
"""

import codecs
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

from midfill.engine.request import EngineOutput, EngineRequest, TokenLogprobs
from midfill.frontend.answer import (
    Answer,
    AnswerBuilder,
    AnswerDelta,
    Candidate,
    StopStrings,
)
from midfill.frontend.candidates import CandidateSearch, FollowUp
from midfill.frontend.confidence import ConfidenceCheck
from midfill.frontend.prompt import LayoutReport, Prompt, PromptAnswer
from midfill.frontend.sampling import PostProcessing, SamplingParams
from midfill.infill.suggestion import suggestion
from midfill.models.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of a prompt.

    Attributes:
        token_id: its id.
        text: its text; a part of a character shows as U+FFFD.
        logprob: natural logarithm of its probability; None for the first token, which follows
            nothing.
        top: the most likely tokens at its place, best first.
        offset: where its text starts in the prompt's, in characters.
    """

    token_id: int
    text: str
    logprob: float | None
    top: tuple[Candidate, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What requests cost.

    Attributes:
        prompt_tokens: tokens of the prompts.
        completion_tokens: generated tokens, without those that stand for healed bytes only.
        cached_tokens: prompt tokens that were found in the prefix cache and not computed.
        reused_tokens: further prompt tokens whose KV a method of reuse took from elsewhere.
        knows_cached: whether the engine has told ``cached_tokens``, which is 0 otherwise. A server
            behind a gateway may tell them at an answer's end only, or not at all.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reused_tokens: int = 0
    knows_cached: bool = True

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were computed in all layers."""
        return self.prompt_tokens - self.cached_tokens - self.reused_tokens

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reused_tokens + other.reused_tokens,
            self.knows_cached and other.knows_cached,
        )


class PromptGeneration:
    """All answers to one prompt: turns the engine's outputs into text.

    Args:
        prompt: see the attribute.
        sampling: how the answers are generated.
        tokenizer: the model's.
        streamed: whether answers are shown while they arrive.

    Attributes:
        prompt: the prompt.
        answer_token_ids: what the first answer consists of so far, healed bytes and all.
        answer_written: what it stands for, from an engine that answers in text; None from others.
        prompt_tokens: its tokens, if their log probabilities were asked for; empty until the first
            output.
    """

    def __init__(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        *,
        streamed: bool = False,
    ) -> None:
        self.prompt = prompt
        self.answer_token_ids: list[int] = []
        self.answer_written: bytes | None = None
        self.prompt_tokens: tuple[PromptToken, ...] = ()
        self._tokenizer = tokenizer
        self._search: CandidateSearch | None = None
        answer = _answer_factory(prompt, sampling, tokenizer, streamed)
        least = sampling.min_confidence
        if sampling.candidates > 1 and sampling.n == 1 and prompt.infilling and not streamed:
            self._search = CandidateSearch(
                sampling.candidates,
                tokenizer,
                lambda: _confidence_check(prompt, 0.0, tokenizer, streamed=False),
                lambda check: answer(0, check),
                least,
            )
        self._answers: Sequence[AnswerBuilder | CandidateSearch] = [
            answer(index, None)
            if least is None or not prompt.infilling
            else answer(index, _confidence_check(prompt, least, tokenizer, streamed=streamed))
            for index in range(sampling.n)
        ]
        if self._search is not None:
            self._answers = [self._search]
        self._cached_tokens = self._reused_tokens = 0
        self._knows_cached = True
        self._counted_prompt: int | None = None
        self._counted_completion: int | None = None
        self._empty_probability: float | None = None

    @property
    def finished(self) -> bool:
        """Whether every answer is complete. The engine may not know yet, after a stop string."""
        return all(answer.finished for answer in self._answers)

    @property
    def usage(self) -> Usage:
        """The cost so far; final once ``finished``."""
        prompt, generated = self._counted_prompt, self._counted_completion
        if prompt is None:
            prompt = len(self.prompt.token_ids)
        if generated is None:
            generated = sum(answer.tokens for answer in self._answers)
        return Usage(
            prompt, generated, self._cached_tokens, self._reused_tokens, self._knows_cached
        )

    @property
    def empty_probability(self) -> float | None:
        """How probable an empty answer was, see ``EngineOutput``."""
        return self._empty_probability

    def best_answers(self, count: int) -> list[int]:
        """Return the indices of the answers with the highest log probability per token.

        Best first; or all in their order, if there are no more.
        """
        if count >= len(self._answers):
            return [answer.index for answer in self._answers]
        ranked = sorted(self._answers, key=lambda answer: answer.mean_logprob, reverse=True)
        return [answer.index for answer in ranked[:count]]

    def abandon(self, reason: str) -> list[AnswerDelta]:
        """End what is unfinished, without the text that is held back; return the last deltas."""
        return [answer.abandon(reason) for answer in self._answers if not answer.finished]

    def push(self, output: EngineOutput) -> AnswerDelta | None:
        """Take an output; return what is new, or None if nothing can be shown yet.

        Raises:
            GenerationError: the engine failed on the request.
        """
        if self._search is not None and self._search.owns(output):
            return self._search.push(output)
        self._knows_cached = output.cached_tokens is not None
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens or 0)
        self._reused_tokens = max(self._reused_tokens, output.reused_tokens)
        if output.prompt_tokens is not None:
            self._counted_prompt = output.prompt_tokens
        if output.completion_tokens is not None:
            self._counted_completion = output.completion_tokens
        if output.empty_probability is not None:
            self._empty_probability = output.empty_probability
        if output.prompt_logprobs is not None:
            prompt = self.prompt
            self.prompt_tokens = prompt_tokens(
                prompt.token_ids, prompt.text, output.prompt_logprobs, self._tokenizer
            )
        if output.index == 0:
            self.answer_token_ids += output.token_ids
            if output.token_bytes is not None:
                self.answer_written = b"".join((self.answer_written or b"", *output.token_bytes))
        return self._answers[output.index].push(output)

    def follow_up(self, request: EngineRequest) -> FollowUp:
        """Return what the engine is to do after an output was taken; see ``CandidateSearch``.

        Args:
            request: the prompt's.
        """
        return FollowUp() if self._search is None else self._search.follow_up(request)

    def refuse(self, requests: Sequence[EngineRequest]) -> AnswerDelta | None:
        """Go on without requests of a ``follow_up``; return what is new, as ``push``."""
        return None if self._search is None else self._search.refuse(requests)


def answered(response: PromptGeneration) -> PromptAnswer:
    """Return a prompt and its first answer, for ``PromptEncoder.record_answers``."""
    return PromptAnswer(response.prompt, response.answer_token_ids, response.answer_written)


def _answer_factory(
    prompt: Prompt, sampling: SamplingParams, tokenizer: Tokenizer, streamed: bool
) -> Callable[[int, ConfidenceCheck | None], AnswerBuilder]:
    """Return what makes an answer to a prompt, given its index and its check."""
    stops = StopStrings(sampling.stops)
    trims = sampling.post_processing
    # A client whose stop string is a line break doesn't want to see one.
    unwanted = any(stop in prompt.line_break for stop in sampling.stop)

    def answer(index: int, check: ConfidenceCheck | None) -> AnswerBuilder:
        return AnswerBuilder(
            index,
            tokenizer,
            sampling,
            stops,
            healed=len(prompt.begins_with),
            line_break="" if unwanted else prompt.line_break,
            channels=None if prompt.channels is None else prompt.channels.reader(),
            trimmer=trims.trimmer(prompt.prefix, prompt.suffix, infilling=prompt.infilling),
            check=check,
            shorten=_suggestion_of(prompt, trims, streamed),
        )

    return answer


def _confidence_check(
    prompt: Prompt, least: float, tokenizer: Tokenizer, *, streamed: bool
) -> ConfidenceCheck:
    return ConfidenceCheck(
        least,
        prompt.confidence_rule,
        prompt.prefix,
        prompt.begins_with,
        tokenizer,
        streamed=streamed,
    )


def _suggestion_of(
    prompt: Prompt, ends: PostProcessing, streamed: bool
) -> Callable[[str, bool], str] | None:
    if streamed or not (ends.suggestion and prompt.infilling):
        return None

    def shorten(text: str, broken_off: bool) -> str:
        return suggestion(text, prompt.prefix, prompt.suffix, broken_off=broken_off)

    return shorten


GeneratedAnswer = Answer  # its former name, kept for one release


def best_first(answers: Sequence[Answer]) -> list[Answer]:
    """Return answers by how probable their first lines are, those without text last.

    Those of which that isn't known stay in their order.
    """

    def rank(answer: Answer) -> tuple[bool, float]:
        found = answer.confidence
        return bool(answer.text.strip()), -math.inf if found is None else found.line.joint

    return sorted(answers, key=rank, reverse=True)


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

    answers: tuple[Answer, ...]
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
        self, response: PromptGeneration, deltas: Generator[tuple[int, AnswerDelta], None, None]
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


def whole_answers(response: PromptGeneration, deltas: Iterable[AnswerDelta]) -> GenerationResult:
    """Return the answers to one prompt, put together from their pieces."""
    pieces: dict[int, list[AnswerDelta]] = {}
    for delta in deltas:
        pieces.setdefault(delta.index, []).append(delta)
    return GenerationResult(
        answers=tuple(Answer.join(pieces[index]) for index in sorted(pieces)),
        usage=response.usage,
        layout=response.prompt.report,
        empty_probability=response.empty_probability,
        prompt_tokens=response.prompt_tokens,
    )


def prompt_tokens(
    token_ids: Sequence[int], text: str, scores: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> tuple[PromptToken, ...]:
    """Return a prompt's tokens with their scores.

    Args:
        token_ids: the prompt.
        text: the text that it was made of; special tokens may be spelled in it.
        scores: of the tokens from the second on.
        tokenizer: the model's.
    """
    reports: list[TokenLogprobs | None] = [None, *scores]
    return tuple(
        PromptToken(
            token_id,
            tokenizer.readable(token_id),
            None if score is None else score.logprob,
            ()
            if score is None
            else tuple(_scored_candidate(*likely, tokenizer) for likely in score.top),
            offset,
        )
        for token_id, score, offset in zip(
            token_ids, reports, _offsets(token_ids, text, tokenizer), strict=True
        )
    )


def _scored_candidate(token_id: int, logprob: float, tokenizer: Tokenizer) -> Candidate:
    return Candidate(
        token_id, tokenizer.readable(token_id), tokenizer.token_bytes(token_id), logprob
    )


def _offsets(token_ids: Sequence[int], text: str, tokenizer: Tokenizer) -> Iterator[int]:
    """Yield where each token's text starts."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    offset = 0
    for token_id in token_ids:
        yield offset
        raw = tokenizer.token_bytes(token_id)
        if not raw:
            name = tokenizer.token_text(token_id)
            written = name if text.startswith(name, offset) else ""  # BOS is not written
        elif offset == 0 and raw.startswith(b" ") and not text.startswith(" "):
            written = decoder.decode(raw[1:])  # the blank that SentencePiece puts before a text
        else:
            written = decoder.decode(raw)
        offset += len(written)
