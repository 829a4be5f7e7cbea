"""EmptyAnswerCheck: whether an answer is empty, decided before its first token is chosen.

Where nothing is missing, the right answer to an infilling request is none. Sampled token by token,
that depends on accidents: greedy decoding writes the most likely token even if it is improbable,
and an end token counts only once the bytes that the answer has to begin with (token healing) are
spelled without anything after them.

The check asks for the probability of the empty answer as a whole, given those bytes: that the
tokens spell them exactly, and an end token follows. If it is above the request's threshold, the
answer is empty. Otherwise it is not: end tokens are impossible until it has text of its own. How
probable an empty answer should be depends on the model; ``midfill eval empty`` measures it.

The check follows the most likely tokens that spell the bytes exactly, and keeps the logits on its
way. Then the answer starts again from the first of them. Where these tokens were drafted, all of
this happens within the step that computes the prompt's last token; otherwise each takes a step.
The decision is the same.
"""

import copy

import numpy as np

from midfill.arrays import Float32Array, Int32Array, RunnerArray
from midfill.models.tokens.healing import HealingConstraint


class EmptyAnswerCheck:
    """The check of one answer.

    Args:
        threshold: an answer is empty if that is more probable.
        end_token_ids: [n] int32, ascending: the tokens that end the answer; at least one.
        constraint: what the answer has to begin with; None if nothing. It is not changed.

    Attributes:
        constraint: what is left of it after ``tokens``; None if nothing.
        tokens: the most likely tokens that spell it exactly, as far as they are known.
        rows: [vocab] float32 each: logits before the first of the tokens, and after each.
        probability: that the answer is empty; until ``decided``, that it begins with the tokens,
            given what it has to begin with.
        end_token: the most likely end token after them, once the check is decided.
        decided: whether the check is complete.
    """

    def __init__(
        self, threshold: float, end_token_ids: Int32Array, constraint: HealingConstraint | None
    ) -> None:
        self.constraint = copy.copy(constraint)
        self.tokens: list[int] = []
        self.rows: list[RunnerArray] = []
        self.probability = 1.0
        self.end_token: int | None = None
        self.decided = False
        self._threshold = threshold
        self._end_token_ids = end_token_ids

    @property
    def is_empty(self) -> bool:
        """Whether the answer is empty, once ``decided``."""
        return self.probability > self._threshold

    def observe(self, logits: RunnerArray, adjusted: Float32Array) -> int | None:
        """Take the logits after the last of ``tokens``.

        Args:
            logits: [vocab] float32, the model's own; kept.
            adjusted: [vocab] float32, the same with penalties and bias.

        Returns:
            The next token, which was added to ``tokens``; None once the check is decided.
        """
        self.rows.append(logits)
        probabilities = _softmax(adjusted)
        if self.constraint is None:
            ends = probabilities[self._end_token_ids]
            self.probability *= float(ends.sum())
            self.end_token = int(self._end_token_ids[ends.argmax()])
            self.decided = True
            return None
        exact = np.array(self.constraint.exact(), dtype=np.int32)
        best = int(exact[probabilities[exact].argmax()]) if len(exact) else None
        possible = float(probabilities[self.constraint.allowed()].sum())
        self.probability *= 0.0 if best is None else _share(probabilities[best], possible)
        # What follows can only make it less probable.
        if best is None or self.probability <= self._threshold:
            self.decided = True
            return None
        self.tokens.append(best)
        self.constraint.advance_by(best)
        if self.constraint.satisfied:
            self.constraint = None
        return best

    def fork(self) -> "EmptyAnswerCheck":
        """Return a check of the same state for another answer."""
        other = copy.copy(self)
        other.constraint = copy.copy(self.constraint)
        other.tokens, other.rows = list(self.tokens), list(self.rows)
        return other


def _softmax(values: Float32Array) -> Float32Array:
    """Return [vocab] float32 probabilities of logits; all 0 if no logit is finite."""
    finite = np.isfinite(values)
    if not finite.any():
        return np.zeros_like(values)
    with np.errstate(over="ignore", invalid="ignore"):
        powers = np.where(finite, np.exp(values - values[finite].max()), 0.0)
    total: float = powers.sum(dtype=np.float64)
    return (powers / total).astype(np.float32)


def _share(part: float, whole: float) -> float:
    return float(part) / whole if whole > 0.0 else 0.0
