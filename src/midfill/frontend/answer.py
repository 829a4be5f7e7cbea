"""Answer: one answer's tokens on their way to text, up to its end.

A healed answer begins with bytes that its prompt already ended with. They are no part of its text,
and the tokens that stand for nothing else count neither as generated nor towards ``max_tokens``.
"""

from collections.abc import Callable
from dataclasses import dataclass

from midfill.engine.request import EngineOutput, TokenLogprobs
from midfill.errors import GenerationError
from midfill.frontend.sampling import SamplingParams
from midfill.frontend.stops import StopScanner, StopStrings
from midfill.tokens.detokenizer import Detokenizer
from midfill.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that could stand at one position.

    Attributes:
        token_id: its id.
        text: its name; for a piece of a character, with U+FFFD in it.
        bytes: exactly what it stands for, healed bytes left out.
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
        top: the likeliest, best first; empty when only the chosen one was asked for. Beside a
            token that begins with healed bytes only those that go on from the same bytes.
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
        token_ids: new tokens, end and stop tokens included, and those of healed bytes.
        logprobs: of tokens whose text has begun to come out; empty when not asked for. Tokens of
            nothing but healed bytes have none.
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

    Args:
        index: which of the request's answers.
        tokenizer: the model's.
        sampling: how it is generated.
        stops: strings that end it, built once for all answers.
        healed: bytes at its start that its prompt already ended with.
        trim: makes the whole answer's text what is shown of it; all of it is held back till then.

    Attributes:
        index: the same.
        tokens: how many were generated, the one that ended it included.
        finished: whether the last delta is out; outputs after that are ignored.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        stops: StopStrings,
        *,
        healed: int = 0,
        trim: Callable[[str], str] | None = None,
    ) -> None:
        self.index = index
        self.tokens = 0
        self.finished = False
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._detokenizer = Detokenizer(tokenizer, healed)
        self._scanner = StopScanner(stops, include_stop=sampling.include_stop_str_in_output)
        self._trim = trim
        self._whole = ""  # text held back to be trimmed
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
        finish_reason: str | None = output.finish_reason
        text = ""
        for position, token_id in enumerate(output.token_ids):
            self._untold.append(token_id)
            healed = self._detokenizer.skip
            shown = healed == 0 or len(self._tokenizer.token_bytes(token_id)) > healed
            self.tokens += shown
            is_end = output.finish_reason == "stop" and position == len(output.token_ids) - 1
            if is_end and not self._sampling.include_stop_str_in_output:
                break
            if shown and output.logprobs is not None:
                self._pending.append(self._report(token_id, output.logprobs[position], healed))
            decoded = self._detokenizer.push([token_id])
            self._decoded += len(decoded)
            text += self._scanner.push(decoded)
            if self._scanner.stopped is not None:
                break
            if self.tokens == self._sampling.max_tokens:
                finish_reason = finish_reason or "length"
                break
        return self._delta(text, finish_reason)

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
        complete = self.finished and self._scanner.stopped is None
        if self._trim is not None:
            self._whole += text
            text = self._trim(self._whole) if self.finished else ""
            complete = complete and text.startswith(self._whole)
        self._shown += len(text)
        logprobs = self._release(complete)
        if not (text or logprobs or self.finished):
            return None
        token_ids, self._untold = tuple(self._untold), []
        return AnswerDelta(self.index, text, token_ids, logprobs, finish_reason, stop_reason)

    def _release(self, complete: bool) -> tuple[TokenLogprob, ...]:
        """Log probabilities of the tokens whose text has been given away; of all if complete."""
        count = 0
        while count < len(self._pending) and (
            complete or self._pending[count].offset < self._shown
        ):
            count += 1
        released, self._pending = self._pending[:count], self._pending[count:]
        return tuple(released)

    def _report(self, token_id: int, logprobs: TokenLogprobs, healed: int) -> TokenLogprob:
        """``healed`` bytes at the token's start are no part of the answer."""
        top = logprobs.top if self._sampling.logprobs else []
        if healed:
            start = self._tokenizer.token_bytes(token_id)[:healed]
            top = [one for one in top if self._goes_on(one[0], start)]
        return TokenLogprob(
            chosen=self._candidate(token_id, logprobs.logprob, healed),
            top=tuple(self._candidate(other, logprob, healed) for other, logprob in top),
            offset=self._decoded,
        )

    def _goes_on(self, token_id: int, start: bytes) -> bool:
        raw = self._tokenizer.token_bytes(token_id)
        return raw.startswith(start) and len(raw) > len(start)

    def _candidate(self, token_id: int, logprob: float, healed: int) -> Candidate:
        raw = self._tokenizer.token_bytes(token_id)[healed:]
        text = raw.decode(errors="replace") or self._tokenizer.token_text(token_id)
        return Candidate(token_id, text, raw, logprob)
