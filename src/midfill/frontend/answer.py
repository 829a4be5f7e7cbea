"""Answer: one answer's tokens on their way to text, up to its end."""

from dataclasses import dataclass

from midfill.engine.request import EngineOutput, TokenLogprobs
from midfill.errors import MidfillError
from midfill.frontend.sampling import SamplingParams
from midfill.frontend.stops import StopScanner, StopStrings
from midfill.tokens.detokenizer import Detokenizer
from midfill.tokens.tokenizer import Tokenizer


class GenerationError(MidfillError):
    """The engine gave up on a request that was in flight."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that could stand at one position.

    Attributes:
        token_id: its id.
        text: its name; for a piece of a character, with U+FFFD in it.
        bytes: exactly what it stands for.
        logprob: natural log of its probability.
    """

    token_id: int
    text: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of an answer with the likeliest ones at its place.

    Attributes:
        chosen: the token itself.
        top: the likeliest, best first; empty when only the chosen one was asked for.
        offset: where its text starts in the answer, in characters.
    """

    chosen: Candidate
    top: tuple[Candidate, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What one answer grew by.

    Attributes:
        index: which of the request's answers.
        text: new text; all deltas together are the answer.
        token_ids: new tokens, end and stop tokens included.
        logprobs: of tokens whose text has begun to come out; empty when not asked for.
        finish_reason: "stop" or "length" in the last delta, None before.
        stop_reason: the stop string or token id that ended it, None for the model's own end.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Answer:
    """One answer of a request: detokenises, finds stop strings, knows when it is done.

    Attributes:
        index: which of the request's answers.
        tokens: how many were generated, the one that ended it included.
        finished: whether the last delta is out; outputs after that are ignored.
    """

    def __init__(
        self, index: int, tokenizer: Tokenizer, sampling: SamplingParams, stops: StopStrings
    ) -> None:
        """Start an answer; ``stops`` are ``sampling.stop``, built once for all answers."""
        self.index = index
        self.tokens = 0
        self.finished = False
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._detokenizer = Detokenizer(tokenizer)
        self._scanner = StopScanner(stops, include_stop=sampling.include_stop_str_in_output)
        self._decoded = 0  # characters that came out of the detokenizer
        self._shown = 0  # characters given away
        self._pending: list[TokenLogprob] = []
        self._untold: list[int] = []  # tokens no delta has told of yet

    def push(self, output: EngineOutput) -> AnswerDelta | None:
        """Take an output of the engine; None when there is nothing to tell yet.

        Raises:
            GenerationError: the engine gave up on this answer.
        """
        if self.finished:
            return None
        if output.finish_reason == "error":
            raise GenerationError(output.error or "the engine gave up on the request")
        ended_by_token = output.finish_reason == "stop"
        text = ""
        taken = 0
        for position, token_id in enumerate(output.token_ids):
            taken += 1
            is_end = ended_by_token and position == len(output.token_ids) - 1
            if is_end and not self._sampling.include_stop_str_in_output:
                break
            if output.logprobs is not None:
                self._pending.append(self._report(token_id, output.logprobs[position]))
            decoded = self._detokenizer.push([token_id])
            self._decoded += len(decoded)
            text += self._scanner.push(decoded)
            if self._scanner.stopped is not None:
                break
        self.tokens += taken
        self._untold += output.token_ids[:taken]
        return self._delta(text, output.finish_reason)

    def _delta(self, text: str, finish_reason: str | None) -> AnswerDelta | None:
        stop_reason: str | int | None = self._scanner.stopped
        if stop_reason is None and finish_reason is not None:
            text += self._scanner.push(self._detokenizer.flush())
            stop_reason = self._scanner.stopped
        if stop_reason is not None:
            finish_reason = "stop"
        elif finish_reason is not None:
            text += self._scanner.flush()
            if finish_reason == "stop" and self._untold:
                last = self._untold[-1]
                stop_reason = last if last in self._sampling.stop_token_ids else None
        self.finished = finish_reason is not None
        self._shown += len(text)
        logprobs = self._release()
        if not (text or logprobs or self.finished):
            return None
        token_ids, self._untold = tuple(self._untold), []
        return AnswerDelta(self.index, text, token_ids, logprobs, finish_reason, stop_reason)

    def _release(self) -> tuple[TokenLogprob, ...]:
        """Log probabilities of the tokens whose text has been given away."""
        complete = self.finished and self._scanner.stopped is None
        count = 0
        while count < len(self._pending) and (
            complete or self._pending[count].offset < self._shown
        ):
            count += 1
        released, self._pending = self._pending[:count], self._pending[count:]
        return tuple(released)

    def _report(self, token_id: int, logprobs: TokenLogprobs) -> TokenLogprob:
        top = logprobs.top if self._sampling.logprobs else []
        return TokenLogprob(
            chosen=self._candidate(token_id, logprobs.logprob),
            top=tuple(self._candidate(other, logprob) for other, logprob in top),
            offset=self._decoded,
        )

    def _candidate(self, token_id: int, logprob: float) -> Candidate:
        raw = self._tokenizer.token_bytes(token_id)
        text = raw.decode(errors="replace") or self._tokenizer.token_text(token_id)
        return Candidate(token_id, text, raw, logprob)
