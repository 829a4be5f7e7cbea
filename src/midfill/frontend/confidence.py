"""ConfidenceCheck: how sure one answer is, from what the engine reports of its tokens.

``infill/confidence.py`` explains the estimate. An answer that is sent whole is judged by its first
line. A streamed one is judged once its first ``START_TOKENS`` tokens are known, so it begins at
most one token later than without the check.
"""

from dataclasses import dataclass
from typing import NamedTuple

from midfill.engine.request import TokenLogprobs
from midfill.infill.confidence import AnswerConfidence, ConfidenceRule, Features, TokenScore
from midfill.models.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Confidence:
    """How sure an answer is.

    Attributes:
        start, line: what its first tokens and its first line tell.
        estimate: the probability that its first line is exactly right; 0 for a blank answer, which
            suggests nothing; None for a model without a ``ConfidenceRule``.
    """

    start: Features
    line: Features
    estimate: float | None


class ObservedToken(NamedTuple):
    """A token of an answer's first line.

    Attributes:
        token_id: its id.
        logprobs: what the engine reports of it.
        logprob: its log probability, given what the answer has to begin with.
        is_free: whether nothing was prescribed at its place.
    """

    token_id: int
    logprobs: TokenLogprobs
    logprob: float
    is_free: bool


class ConfidenceCheck:
    """The check of one answer.

    Args:
        least: withhold the answer if the estimate is below.
        rule: the model's; None withholds nothing.
        prefix: the text before the caret.
        begins_with: bytes at its end that the answer's tokens begin with (token healing).
        tokenizer: the model's.
        streamed: whether the answer is shown while it arrives.

    Attributes:
        observed: the tokens of the first line so far.
    """

    def __init__(
        self,
        least: float,
        rule: ConfidenceRule | None,
        prefix: str,
        begins_with: bytes,
        tokenizer: Tokenizer,
        *,
        streamed: bool,
    ) -> None:
        self._least = least
        self._rule = rule
        self._streamed = streamed
        self._tokenizer = tokenizer
        self._begins_with = begins_with
        self._answer = AnswerConfidence(prefix)
        self.observed: list[ObservedToken] = []

    @property
    def line_ended(self) -> bool:
        """Whether the answer's first line is complete."""
        return self._answer.line_ended

    @property
    def is_blank(self) -> bool:
        """Whether the answer has no text so far."""
        return self._answer.is_blank

    @property
    def joint(self) -> float:
        """Log probability of the first line so far, given what it has to begin with."""
        return self._answer.joint

    def observe(self, token_id: int, logprobs: TokenLogprobs, text: str) -> None:
        """Take the next token, and the text that it adds to the answer."""
        if self._answer.line_ended:  # nothing that follows counts
            return
        begins_with = self._begins_with
        others = [
            logprob
            for other, logprob in logprobs.top
            if other != token_id and (not begins_with or self._begins(other, begins_with))
        ]
        score = TokenScore.of(logprobs.logprob, others, conditional=bool(begins_with))
        self._begins_with = begins_with[len(self._tokenizer.token_bytes(token_id)) :]
        self._answer.push(score, text)
        self.observed.append(ObservedToken(token_id, logprobs, score.logprob, not begins_with))

    def shows(self, *, finished: bool) -> bool | None:
        """Return whether the answer is sure enough; None as long as that isn't known.

        Args:
            finished: whether the answer is complete.
        """
        if self._rule is None or self._least == 0.0:
            return True
        if self._streamed and self._answer.knows_start and not self._answer.line_ended:
            features = self._answer.start()
            return features is None or self._rule.start.probability(features) >= self._least
        if not (finished or self._answer.line_ended):
            return None
        found = self.confidence()
        return found is None or found.estimate is None or found.estimate >= self._least

    def confidence(self) -> Confidence | None:
        """Return how sure the answer is; None if nothing is known of its tokens."""
        start, line = self._answer.start(), self._answer.line()
        if start is None or line is None:
            return None
        estimate = None if self._rule is None else self._rule.line.probability(line)
        if self._answer.is_blank and estimate is not None:
            estimate = 0.0
        return Confidence(start, line, estimate)

    def _begins(self, token_id: int, expected: bytes) -> bool:
        """Return whether a token could be the next one of an answer that begins with some bytes."""
        written = self._tokenizer.token_bytes(token_id)
        return bool(written) and (written.startswith(expected) or expected.startswith(written))
