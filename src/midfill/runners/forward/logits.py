"""LogitsOps: what sampling asks of logits, answered where a runner keeps them.

A vector is the float32 logits [n] of one token: a row of what ``Runner.forward`` returns, or made
of one by the functions here. The vectors of one call have one length. No vector's results depend on
the other vectors.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int64Array, RunnerArray


class LogitsOps(Protocol):
    """Operations on logits of one runner."""

    def to_numpy(self, logits: RunnerArray) -> Float32Array:
        """Return logits of any shape in NumPy's memory; they may share it."""

    def copy(self, vector: RunnerArray) -> RunnerArray:
        """Return a copy, the caller's own."""

    def add(self, vector: RunnerArray, ids: Int64Array, values: Float64Array) -> None:
        """Add values [n], rounded to float32, to a vector's logits of [n] different ids."""

    def mask_nonfinite(self, vector: RunnerArray) -> RunnerArray:
        """Return a vector with -infinity for values that are not finite."""

    def argmax(self, vectors: Sequence[RunnerArray]) -> list[tuple[int, float]]:
        """Return (id, value) of each vector's largest value, or of one that is NaN."""

    def second_largest(self, vector: RunnerArray, best: int) -> float | None:
        """Return the largest value but for id ``best``; None where that would take long."""

    def top_k(self, vectors: Sequence[RunnerArray], count: int) -> Int64Array:
        """Return the ids of each vector's largest values, ascending: [vectors, count] int64."""

    def gather(self, vectors: Sequence[RunnerArray], ids: Int64Array) -> Float64Array:
        """Return each vector's values at [vectors, count] ids: float64 of that shape."""

    def log_normalizers(
        self, vectors: Sequence[RunnerArray], temperatures: Sequence[float]
    ) -> Float64Array:
        """Return log sum exp(vector / temperature) of each vector: float64 [vectors].

        Values are finite or -infinity, and one of a vector's is finite.
        """

    def draw(
        self,
        vectors: Sequence[RunnerArray],
        temperatures: Sequence[float],
        draws: Sequence[float],
    ) -> list[int]:
        """Return the first id of each vector at which the cumulative distribution exceeds the draw.

        Args:
            vectors: see ``log_normalizers``.
            temperatures: of softmax(vector / temperature).
            draws: in [0, 1), one per vector.
        """


def argmax_tokens(ops: LogitsOps, logits: RunnerArray) -> list[int]:
    """Find what ``Runner.argmax_tokens`` returns, for runners whose forward pass doesn't."""
    found = ops.argmax(list(logits))
    return [best if math.isfinite(value) else -1 for best, value in found]


def log_softmax(logits: Float32Array) -> Float32Array:
    """Return the log probabilities that logits [..., vocab] stand for."""
    shifted: Float32Array = logits - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted
