"""One answer: ``AnswerBuilder`` turns its tokens into text and finds its end.

A healed answer begins with bytes that the text before the caret already ended with. They are not
part of the answer's text. Tokens that stand for such bytes only count neither as generated tokens
nor towards ``max_tokens``.

Stop strings are found in text that arrives piece by piece (``StopScanner``). The matcher is the one
of Aho and Corasick ("Efficient string matching: an aid to bibliographic search", 1975). Its state
is the longest suffix of the text so far that is a prefix of some stop string. Exactly this suffix
has to be held back until it is known whether the stop string follows.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from midfill.engine.request import EngineOutput, TokenLogprobs
from midfill.errors import DeadlineError, GenerationError
from midfill.frontend.channels import Call, CallPiece, ChannelReader
from midfill.frontend.confidence import Confidence, ConfidenceCheck
from midfill.frontend.sampling import SamplingParams
from midfill.infill.trim import Trimmer
from midfill.models.tokens.tokenizer import Detokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that is possible at one position.

    Attributes:
        token_id: its id.
        text: its text; a part of a character shows as U+FFFD.
        bytes: exactly what it stands for, without healed bytes.
        logprob: natural logarithm of its probability.
    """

    token_id: int
    text: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of an answer with the most likely tokens at its position.

    Attributes:
        chosen: the token itself.
        top: the most likely tokens, best first; empty if only the chosen one was asked for. Where
            the chosen token begins with healed bytes, only tokens that continue the same bytes.
        offset: where its text starts in the answer, in characters.
    """

    chosen: Candidate
    top: tuple[Candidate, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What is new in one answer.

    Attributes:
        index: which of the request's answers.
        text: new text; the texts of all deltas together are the answer.
        token_ids: new tokens, including end and stop tokens and those of healed bytes.
        logprobs: one entry per token whose text has begun to be shown; empty if not asked for.
            Tokens that stand for healed bytes only have none.
        finish_reason: "stop", "length" or what ``abandon`` was given, in the last delta; None
            before.
        stop_reason: the stop string or token id that ended the answer; None for the model's own
            end token.
        confidence: how sure the answer is, in the last delta; None before, and if not asked for.
        reasoning: new text of the model's reasoning, where the model keeps it apart.
        calls: what is new in calls of functions; likewise.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    confidence: Confidence | None = None
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()

    def after(self, earlier: "AnswerDelta") -> "AnswerDelta":
        """Return this delta with what is new in one that was held back."""
        return dataclasses.replace(
            self,
            text=earlier.text + self.text,
            token_ids=earlier.token_ids + self.token_ids,
            logprobs=earlier.logprobs + self.logprobs,
            reasoning=earlier.reasoning + self.reasoning,
            calls=earlier.calls + self.calls,
        )


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        text: the answer, without the prompt.
        token_ids: its tokens, including the one that ended it and those of healed bytes.
        finish_reason: "stop", "length", or why the caller gave it up.
        stop_reason: the stop string or stop token id that ended it, if one did.
        logprobs: one entry per token of the text; empty if not asked for.
        confidence: how sure it is; None if not asked for, or not known.
        reasoning: the model's reasoning, where the model keeps it apart.
        calls: calls of functions; likewise.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprob, ...]
    confidence: Confidence | None = None
    reasoning: str = ""
    calls: tuple[Call, ...] = ()

    @classmethod
    def join(cls, deltas: Sequence[AnswerDelta]) -> "Answer":
        """Return a whole answer, put together from all its pieces."""
        last = deltas[-1]
        return cls(
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
            finish_reason=last.finish_reason or "",
            stop_reason=last.stop_reason,
            logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
            confidence=last.confidence,
            reasoning="".join(delta.reasoning for delta in deltas),
            calls=Call.join(piece for delta in deltas for piece in delta.calls),
        )


class StopStrings:
    """The automaton for a set of stop strings; immutable, shared by all answers of a request.

    It finds the string that ends first in the text, and of several that end there the longest.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Build the automaton. Empty strings are ignored."""
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fallback = [0]
        self._matched = [0]  # length of the longest stop string that ends in this state
        for stop in stops:
            self._insert(stop)
        self._link()

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def advance(self, state: int, character: str) -> int:
        """Return the state after one more character; 0 is the initial state."""
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def held(self, state: int) -> int:
        """Return how many characters at the text's end may be the start of a stop string."""
        return self._depth[state]

    def matched(self, state: int) -> int:
        """Return the length of the stop string that the text ends with, or 0."""
        return self._matched[state]

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._depth.append(self._depth[state] + 1)
                self._next.append({})
                self._fallback.append(0)
                self._matched.append(0)
            state = self._next[state][character]
        self._matched[state] = len(stop)

    def _link(self) -> None:
        """Set each state's fallback: its longest proper suffix that is a state as well."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            self._matched[state] = self._matched[state] or self._matched[self._fallback[state]]
            for character, child in self._next[state].items():
                self._fallback[child] = self.advance(self._fallback[state], character)
                queue.append(child)


class StopScanner:
    """The scanner of one answer: lets text pass that can't be part of a stop string.

    Args:
        stops: the automaton.
        include_stop: let the stop string itself pass as well.

    Attributes:
        stopped: the stop string that was found, or None.
    """

    def __init__(self, stops: StopStrings, *, include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """Add text and return what can be shown now; nothing after a stop string."""
        if self.stopped is not None:
            return ""
        if not self._stops:
            return text
        seen = self._held + text
        state = self._state
        for end in range(len(self._held) + 1, len(seen) + 1):
            state = self._stops.advance(state, seen[end - 1])
            length = self._stops.matched(state)
            if length:
                self.stopped = seen[end - length : end]
                self._held = ""
                return seen[:end] if self._include_stop else seen[: end - length]
        self._state = state
        shown = len(seen) - self._stops.held(state)
        self._held = seen[shown:]
        return seen[:shown]

    def flush(self) -> str:
        """Return what was held back, once the answer has ended without a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held


class AnswerBuilder:
    """One answer of a request: detokenises it, finds stop strings, decides when it ends.

    Args:
        index: which of the request's answers.
        tokenizer: the model's tokenizer.
        sampling: how the answer is generated.
        stops: strings that end it; one automaton serves all answers of a request.
        healed: number of bytes at its start that the text before the caret ended with.
        trimmer: decides where the text ends before the model ends it; None shows all of it.
        line_break: ends the answer if it isn't blank and doesn't end with a line break itself.
        channels: tells the answer's text from what stands beside it; None: all of it is text. Stop
            strings end the text only, and only its tokens have log probabilities.
        check: withholds the answer if it isn't sure enough; None shows it in any case.
        shorten: called with the whole answer and whether it is incomplete; returns the part to
            show. None shows all of it, as it arrives.
        clock: returns the time in seconds.

    Attributes:
        index: the same.
        tokens: how many were generated, including the one that ended it.
        finished: whether the last delta was returned; later outputs are ignored.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        stops: StopStrings,
        *,
        healed: int = 0,
        trimmer: Trimmer | None = None,
        line_break: str = "",
        channels: ChannelReader | None = None,
        check: ConfidenceCheck | None = None,
        shorten: Callable[[str, bool], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = index
        self.tokens = 0
        self.finished = False
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._soft_max_tokens = sampling.post_processing.soft_max_tokens
        self._detokenizer = Detokenizer(tokenizer, healed)
        self._scanner = StopScanner(stops, include_stop=sampling.include_stop_str_in_output)
        self._trimmer = trimmer
        self._line_break = line_break
        self._channels = channels
        self._blank = True  # whether all text returned so far is
        self._last = ""  # character of it
        self._check = check
        self._shorten = shorten
        self._held: AnswerDelta | None = None  # until it is known what to show
        self._decided = check is None and shorten is None
        self._clock = clock
        self._end_time: float | None = None  # after which the answer ends with its line
        self._decoded = 0  # characters returned by the detokenizer
        self._shown = 0  # how many of them were returned to the caller
        self._pending: list[TokenLogprob] = []
        self._undecided: list[TokenLogprob] = []  # of tokens that may turn out to be no content
        self._logprob, self._scored = 0.0, 0  # sum over tokens, and how many
        self._unreported: list[int] = []  # tokens that no delta has reported yet

    @property
    def mean_logprob(self) -> float:
        """Log probability per token, the one that ended the answer included.

        Minus infinity without log probabilities. Tokens of healed bytes alone don't count.
        """
        return self._logprob / self._scored if self._scored else -inf

    def push(self, output: EngineOutput) -> AnswerDelta | None:
        """Take an output of the engine; return what is new, or None if nothing can be shown yet.

        Raises:
            GenerationError: the engine failed on this answer.
            DeadlineError: it would have come too late.
        """
        if self.finished:
            return None
        if output.finish_reason == "error":
            raise GenerationError(output.error or "the engine failed on this request")
        if output.finish_reason == "expired":
            raise DeadlineError.passed()
        finish_reason: str | None = output.finish_reason
        if self._sampling.max_tokens == 0:  # the engine's one token is none of the answer
            return self._delta("", "", "length")
        self._watch_time()
        text = trimmed = ""
        scanner, trimmer, logprobs = self._scanner, self._trimmer, output.logprobs
        for position, (token_id, written) in enumerate(self._tokens_of(output)):
            self._unreported.append(token_id)
            healed = self._detokenizer.skip
            shown = healed == 0 or len(written) > healed
            self.tokens += shown
            if shown and logprobs is not None:
                self._logprob += logprobs[position].logprob
                self._scored += 1
            is_end = output.finish_reason == "stop" and position == len(output.token_ids) - 1
            if is_end and not self._sampling.include_stop_str_in_output:
                self._observe(token_id, output, position, "")
                break
            decoded = self._decode(token_id, written)
            if shown and logprobs is not None and self._sampling.logprobs is not None:
                self._queue(self._report(token_id, logprobs[position], healed))
            self._observe(token_id, output, position, decoded)
            self._decoded += len(decoded)
            text += scanner.push(decoded)
            if scanner.stopped is not None:
                break
            if trimmer is not None and shown and self.tokens == self._soft_max_tokens:
                trimmed += trimmer.push(text)
                text = ""
                trimmer.end_at_line_break()
            if self.tokens == self._sampling.max_tokens:
                finish_reason = finish_reason or "length"
                break
        return self._shown_part(self._delta(trimmed, text, finish_reason))

    def abandon(self, reason: str) -> AnswerDelta:
        """End the answer where it is, for a reason of the caller's; return its last delta."""
        self.finished = True
        return AnswerDelta(self.index, "", tuple(self._unreported), (), reason)

    def _observe(self, token_id: int, output: EngineOutput, position: int, text: str) -> None:
        """Let the check see a token and its text."""
        if self._check is not None and output.logprobs is not None:
            self._check.observe(token_id, output.logprobs[position], text)

    def _shown_part(self, delta: AnswerDelta | None) -> AnswerDelta | None:
        """Return a delta, after what was held back, once it is known what of the answer to show."""
        if not self._decided:
            if delta is not None and self._held is not None:
                delta = delta.after(self._held)
            delta, self._held = delta or self._held, None
            shows = self._check is None or self._check.shows(finished=self.finished)
            if shows is None or (shows and self._shorten is not None and not self.finished):
                self._held = delta
                return None
            self._decided = True
            if not shows:
                self.finished = True
                token_ids = (() if delta is None else delta.token_ids) + tuple(self._unreported)
                delta = AnswerDelta(self.index, "", token_ids, finish_reason="stop")
            elif self._shorten is not None and delta is not None:
                delta = self._shortened(delta, self._shorten)
        if self._check is None or delta is None or delta.finish_reason is None:
            return delta
        return dataclasses.replace(delta, confidence=self._check.confidence())

    def _shortened(self, whole: AnswerDelta, shorten: Callable[[str, bool], str]) -> AnswerDelta:
        """Return the part of a whole answer to show."""
        text = shorten(whole.text, whole.finish_reason == "length")
        if text == whole.text:
            return whole
        kept = tuple(report for report in whole.logprobs if report.offset < len(text))
        return dataclasses.replace(
            whole, text=text, logprobs=kept, finish_reason="stop", stop_reason=None
        )

    def _tokens_of(self, output: EngineOutput) -> Iterable[tuple[int, bytes]]:
        """Return an output's tokens, and what each stands for."""
        written: Iterable[bytes] | None = output.token_bytes
        if written is None:
            written = map(self._tokenizer.token_bytes, output.token_ids)
        return zip(output.token_ids, written, strict=True)

    def _decode(self, token_id: int, written: bytes) -> str:
        """Return what a token adds to the answer's text."""
        channels = self._channels
        if channels is None:
            return self._detokenizer.push_bytes(written)
        marker = channels.markers.get(token_id)
        if marker is None:
            return channels.read(self._detokenizer.push_bytes(written))
        return channels.read(self._detokenizer.flush()) + channels.read(marker)

    def _queue(self, report: TokenLogprob) -> None:
        """Take a token's report, to be returned with its text, if that is content."""
        self._undecided.append(report)
        self._decide(True if self._channels is None else self._channels.in_content)

    def _decide(self, in_content: bool | None) -> None:
        """Queue the undecided reports or drop them, once it is known which."""
        if in_content is not None:
            self._pending += self._undecided if in_content else ()
            self._undecided.clear()

    def _decode_rest(self) -> str:
        """Return the end of the answer's text, once there are no more tokens."""
        rest, channels = self._detokenizer.flush(), self._channels
        if channels is None:
            return rest
        rest = channels.read(rest) + channels.finish()
        self._decide(channels.in_content)
        return rest

    def _watch_time(self) -> None:
        """Let the answer end with its line once its time is over."""
        if self._trimmer is None or self._sampling.post_processing.max_seconds == inf:
            return
        now = self._clock()
        if self._end_time is None:
            self._end_time = now + self._sampling.post_processing.max_seconds
        if now > self._end_time:
            self._trimmer.end_at_line_break()

    def _delta(self, trimmed: str, text: str, finish_reason: str | None) -> AnswerDelta | None:
        """Return what is new: ``trimmed`` text, and ``text`` that is not trimmed yet."""
        stop_reason: str | int | None = self._scanner.stopped
        if stop_reason is None and finish_reason is not None:
            text += self._scanner.push(self._decode_rest())
            stop_reason = self._scanner.stopped
        if stop_reason is not None:
            finish_reason = "stop"
        elif finish_reason is not None:
            text += self._scanner.flush()
            if finish_reason == "stop" and self._unreported:
                last = self._unreported[-1]
                stop_reason = last if last in self._sampling.stop_token_ids else None
        complete = finish_reason is not None and self._scanner.stopped is None
        if self._trimmer is None:
            self._shown += len(text)
        else:
            text = trimmed + self._trimmer.push(text)
            if finish_reason is not None:
                text += self._trimmer.finish(broken_off=finish_reason == "length")
            self._shown = self._trimmer.kept
            if self._trimmer.cut:
                finish_reason = "length" if self._trimmer.ended_at_line_break else "stop"
                stop_reason, complete = None, False
        self.finished = finish_reason is not None
        text += self._closing(text)
        logprobs = self._release(complete)
        reasoning, calls = ("", ()) if self._channels is None else self._channels.take()
        if not (text or reasoning or calls or logprobs or self.finished):
            return None
        token_ids, self._unreported = tuple(self._unreported), []
        return AnswerDelta(
            self.index, text, token_ids, logprobs, finish_reason, stop_reason,
            reasoning=reasoning, calls=calls,
        )  # fmt: skip

    def _closing(self, text: str) -> str:
        """Take note of text that is returned; return what has to end the answer after it."""
        if not self._line_break:
            return ""
        self._blank = self._blank and not text.strip()
        self._last = text[-1:] or self._last
        closes = self.finished and not self._blank and self._last != "\n"
        return self._line_break if closes else ""

    def _release(self, complete: bool) -> tuple[TokenLogprob, ...]:
        """Return the log probabilities of tokens whose text was returned; of all if complete."""
        if not self._pending:
            return ()
        count = 0
        while count < len(self._pending) and (
            complete or self._pending[count].offset < self._shown
        ):
            count += 1
        released, self._pending = self._pending[:count], self._pending[count:]
        return tuple(released)

    def _report(self, token_id: int, logprobs: TokenLogprobs, healed: int) -> TokenLogprob:
        """Describe a token; ``healed`` bytes at its start are not part of the answer."""
        top = logprobs.top[: self._sampling.logprobs or 0]
        if healed:
            start = self._tokenizer.token_bytes(token_id)[:healed]
            top = [likely for likely in top if self._continues(likely[0], start)]
        return TokenLogprob(
            chosen=self._candidate(token_id, logprobs.logprob, healed),
            top=tuple(self._candidate(other, logprob, healed) for other, logprob in top),
            offset=self._decoded,
        )

    def _continues(self, token_id: int, start: bytes) -> bool:
        raw = self._tokenizer.token_bytes(token_id)
        return raw.startswith(start) and len(raw) > len(start)

    def _candidate(self, token_id: int, logprob: float, healed: int) -> Candidate:
        raw = self._tokenizer.token_bytes(token_id)[healed:]
        text = raw.decode(errors="replace") or self._tokenizer.token_text(token_id)
        return Candidate(token_id, text, raw, logprob)
