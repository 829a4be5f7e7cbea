"""How long a prefill or a decode step takes, fitted to measured times.

Source: DistServe (Zhong et al., OSDI 2024, arXiv 2401.09670), section 4.1 and appendix A. A prefill
costs a constant, what all products of its tokens cost, and attention, which grows with the square
of each prompt's length. A decode step costs a constant, the reading of each sequence's KV, and what
one more sequence costs; the last differs between small batches, bound by reading the weights, and
large ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from midfill.errors import MidfillError


def between(first: float, second: float, share: float) -> float:
    """Return the mean of two numbers of which the second has this share."""
    return first + share * (second - first)


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """A measured prefill: the tokens of each prompt of the batch, and its seconds."""

    prompts: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """A measured decode step: the tokens of each sequence's context, and its seconds."""

    contexts: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefillLatency:
    """Seconds of a prefill: ``constant + per_token * sum(l) + per_square * sum(l * l)``."""

    constant: float
    per_token: float
    per_square: float

    def seconds(self, prompts: Sequence[int]) -> float:
        """Return the seconds of a batch of prompts with these numbers of tokens."""
        squares = sum(tokens * tokens for tokens in prompts)
        return self.constant + self.per_token * sum(prompts) + self.per_square * squares

    def between(self, other: "PrefillLatency", share: float) -> "PrefillLatency":
        """Return what it takes where another latency holds for a share of the time."""
        return PrefillLatency(
            between(self.constant, other.constant, share),
            between(self.per_token, other.per_token, share),
            between(self.per_square, other.per_square, share),
        )


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of a step: ``constant + per_context_token * sum(contexts) + per_sequence * n``."""

    constant: float
    per_context_token: float
    per_sequence: float

    def between(self, other: "DecodeCost", share: float) -> "DecodeCost":
        """Return what it costs where another cost holds for a share of the time."""
        return DecodeCost(
            between(self.constant, other.constant, share),
            between(self.per_context_token, other.per_context_token, share),
            between(self.per_sequence, other.per_sequence, share),
        )


@dataclass(frozen=True, slots=True)
class DecodeLatency:
    """Seconds of a decode step.

    Attributes:
        small, large: of batches below ``threshold``, and from it on.
        threshold: sequences.
    """

    small: DecodeCost
    large: DecodeCost
    threshold: int

    def seconds(self, sequences: int, context_tokens: int) -> float:
        """Return the seconds of a step of so many sequences with so many tokens together."""
        cost = self.small if sequences < self.threshold else self.large
        return (
            cost.constant + cost.per_context_token * context_tokens + cost.per_sequence * sequences
        )

    def between(self, other: "DecodeLatency", share: float) -> "DecodeLatency":
        """Return what it takes where another latency holds for a share of the time."""
        small = self.small.between(other.small, share)
        return DecodeLatency(small, self.large.between(other.large, share), self.threshold)


def fit_prefill(samples: Sequence[PrefillSample]) -> PrefillLatency:
    """Fit a prefill's latency by least squares of the relative errors, no term negative.

    Raises:
        MidfillError: the samples don't determine it.
    """
    rows = [
        (1.0, sum(sample.prompts), sum(tokens * tokens for tokens in sample.prompts))
        for sample in samples
    ]
    return PrefillLatency(*_fit(rows, [sample.seconds for sample in samples], "prefill"))


def fit_decode(samples: Sequence[DecodeSample], threshold: int) -> DecodeLatency:
    """Fit a decode step's latency, small and large batches apart.

    Where there are too few samples of one kind, it has the other's coefficients.

    Raises:
        MidfillError: the samples don't determine it.
    """
    small = [sample for sample in samples if len(sample.contexts) < threshold]
    large = [sample for sample in samples if len(sample.contexts) >= threshold]
    known = [_fit_decode(part) for part in (small, large) if _determines(part)]
    if not known:
        return DecodeLatency(_fit_decode(samples), _fit_decode(samples), threshold)
    return DecodeLatency(known[0], known[-1], threshold)


def _determines(samples: Sequence[DecodeSample]) -> bool:
    return len(samples) >= 3 and np.linalg.matrix_rank(np.array(_decode_rows(samples))) == 3


def _fit_decode(samples: Sequence[DecodeSample]) -> DecodeCost:
    return DecodeCost(
        *_fit(_decode_rows(samples), [sample.seconds for sample in samples], "decode")
    )


def _decode_rows(samples: Sequence[DecodeSample]) -> list[tuple[float, float, float]]:
    return [(1.0, sum(sample.contexts), len(sample.contexts)) for sample in samples]


def _fit(
    rows: Sequence[tuple[float, float, float]], seconds: Sequence[float], what: str
) -> tuple[float, float, float]:
    """Return coefficients >= 0 that minimise the sum of squared relative errors.

    With three terms, the best of the solutions over each subset of terms that has no negative
    coefficient is the non-negative least squares solution.
    """
    matrix, times = np.array(rows, np.float64), np.array(seconds, np.float64)
    if len(rows) < 3 or np.linalg.matrix_rank(matrix) < 3 or (times <= 0).any():
        raise MidfillError(
            f"the measured {what} times don't determine its latency: measure at least three"
            " different sizes"
        )
    weighted, ones = matrix / times[:, None], np.ones(len(times))
    best, least = np.zeros(3), np.inf
    for chosen in ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,)):
        found, *_ = np.linalg.lstsq(weighted[:, chosen], ones, rcond=None)
        error = float(np.square(weighted[:, chosen] @ found - ones).sum())
        if (found >= 0).all() and error < least:
            least, best = error, np.zeros(3)
            best[list(chosen)] = found
    return float(best[0]), float(best[1]), float(best[2])
