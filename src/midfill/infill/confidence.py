"""Confidence: how probable it is that the first line of an answer is exactly right.

An editor that is silent when the model doesn't know is worth more than one that always speaks. What
the model knows shows in the probabilities of the tokens that it chose, up to the end of the
answer's first line that has text:

* ``joint``: the sum of their log probabilities, given the bytes that the answer has to begin with
  (token healing). Without that condition, a prefix that ends in an unusual word looks like doubt.
* ``margin``: the least distance to the most likely other token. One close decision is enough to go
  wrong.
* ``entropy``: the greatest of the most likely tokens' entropies.
* ``repeats``: whether the line, from the caret's line on, stands above already. Repeated lines are
  right more often than their probabilities say.

A logistic regression makes a probability of them (``Estimator``), fitted for each model on held-out
files (``midfill eval confidence``), where probabilities as such are badly calibrated. There are two
for each model: one that sees the whole line, and one for streamed answers, which have to be shown
or withheld at once and are judged by their first ``START_TOKENS`` tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

START_TOKENS = 2
"""Tokens of a streamed answer that are seen before it is shown."""

TOP_TOKENS = 5
"""The most likely tokens at each place whose log probabilities are looked at."""

_MIN_JOINT = -50.0  # lower ones say no more
_MAX_MARGIN = 10.0
_MAX_BEFORE = 4000  # characters before the caret in which a line is looked for


@dataclass(frozen=True, slots=True)
class TokenScore:
    """What one token tells.

    Attributes:
        logprob: its log probability, given what the answer has to begin with.
        margin: its log probability minus that of the most likely other token; infinite if it is the
            only one that is possible.
        entropy: of the most likely tokens, in nats.
    """

    logprob: float
    margin: float
    entropy: float

    @classmethod
    def of(
        cls, logprob: float, others: Sequence[float], *, conditional: bool = False
    ) -> "TokenScore":
        """Return the score of a token.

        Args:
            logprob: its log probability, finite.
            others: those of the most likely other tokens that were possible, finite.
            conditional: whether others were not, because of what the answer has to begin with.
        """
        if conditional:
            possible = _log_sum_exp((logprob, *others))
            logprob, others = logprob - possible, [each - possible for each in others]
        entropy = -sum(math.exp(each) * each for each in (logprob, *others))
        return cls(logprob, logprob - max(others, default=-math.inf), entropy)


@dataclass(frozen=True, slots=True)
class Features:
    """What an answer's first tokens tell; see the module.

    Attributes:
        joint, margin: at most 0, and at most ``_MAX_MARGIN``.
        entropy: nats.
        repeats: 0 or 1.
    """

    joint: float
    margin: float
    entropy: float
    repeats: float

    @classmethod
    def of(cls, scores: Sequence[TokenScore], repeats: bool) -> "Features":
        """Return the features of one or more tokens."""
        return cls(
            max(sum(score.logprob for score in scores), _MIN_JOINT),
            min(_MAX_MARGIN, *(score.margin for score in scores)),
            max(score.entropy for score in scores),
            float(repeats),
        )


@dataclass(frozen=True, slots=True)
class Estimator:
    """A logistic regression: the logit is ``intercept`` plus the weighted sum of the features."""

    intercept: float
    joint: float
    margin: float
    entropy: float
    repeats: float

    def probability(self, features: Features) -> float:
        """Return the estimated probability that the line is right."""
        intercept, *weights = astuple(self)
        pairs = zip(weights, astuple(features), strict=True)
        logit = intercept + math.fsum(weight * value for weight, value in pairs)
        return 1.0 / (1.0 + math.exp(-max(-500.0, min(500.0, logit))))


@dataclass(frozen=True, slots=True)
class ConfidenceRule:
    """How sure a model's answers are, and how sure they should be.

    Attributes:
        line: estimates by all tokens of the answer's first line.
        start: estimates by its first ``START_TOKENS`` tokens.
        threshold: in an editor, less probable answers are better not shown.
    """

    line: Estimator
    start: Estimator
    threshold: float


class AnswerConfidence:
    """Follows one answer's tokens up to the end of its first line that has text.

    Args:
        prefix: the text before the caret.

    Attributes:
        is_blank: whether no text has arrived that is more than white space.
        line_ended: whether the line is complete: nothing that follows counts.
    """

    def __init__(self, prefix: str) -> None:
        start = prefix.rfind("\n") + 1
        self.is_blank = True
        self.line_ended = False
        self._before = prefix[max(0, start - _MAX_BEFORE) : start]
        self._line = prefix[start:]
        self._scores: list[TokenScore] = []
        self._start: Features | None = None

    def push(self, score: TokenScore, text: str) -> None:
        """Take the next token and the text that it adds; of a token that ends the answer, none."""
        if self.line_ended:
            return
        self._scores.append(score)
        self._read(text)
        if len(self._scores) == START_TOKENS:
            self._start = self._features()

    @property
    def knows_start(self) -> bool:
        """Whether the first tokens are known."""
        return self.line_ended or len(self._scores) >= START_TOKENS

    def start(self) -> Features | None:
        """Return the features of the first tokens, as many as there are; None without any."""
        return self._start or self._features()

    def line(self) -> Features | None:
        """Return the features of the line so far; None without tokens."""
        return self._features()

    @property
    def joint(self) -> float:
        """Log probability of the line so far, however low."""
        return math.fsum(score.logprob for score in self._scores)

    def _read(self, text: str) -> None:
        for char in text:
            if char == "\n" and not self.is_blank:
                self.line_ended = True
                return
            if char == "\n":
                self._before += f"{self._line}\n"
                self._line = ""
            else:
                self._line += char
                self.is_blank = self.is_blank and char.isspace()

    def _features(self) -> Features | None:
        if not self._scores:
            return None
        line = self._line.strip()
        return Features.of(self._scores, bool(line) and line in self._before)


def _log_sum_exp(values: Sequence[float]) -> float:
    most = max(values)
    return most + math.log(math.fsum(math.exp(value - most) for value in values))
