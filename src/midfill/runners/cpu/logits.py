"""NumpyLogits: what sampling asks of logits, in NumPy.

NumPy has vector instructions for the passes that are over a whole vocabulary: of 50,000 tokens,
each takes 3 to 20 µs.
"""

import math
from collections.abc import Sequence

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int64Array

FOLDS = 64
"""``top_ids`` pays for rows that are at least this many times as long as the number of ids."""

_BLOCK = 256  # values that are summed before they are drawn from


class NumpyLogits:
    """Implements ``runners.forward.logits.LogitsOps``."""

    def to_numpy(self, logits: Float32Array) -> Float32Array:
        """See ``LogitsOps``."""
        return logits

    def copy(self, vector: Float32Array) -> Float32Array:
        """See ``LogitsOps``."""
        return vector.copy()

    def add(self, vector: Float32Array, ids: Int64Array, values: Float64Array) -> None:
        """See ``LogitsOps``."""
        vector[ids] += values.astype(np.float32)

    def mask_nonfinite(self, vector: Float32Array) -> Float32Array:
        """See ``LogitsOps``."""
        masked: Float32Array = np.where(np.isfinite(vector), vector, np.float32(-np.inf))
        return masked

    def argmax(self, vectors: Sequence[Float32Array]) -> list[tuple[int, float]]:
        """See ``LogitsOps``."""
        places = [int(vector.argmax()) for vector in vectors]
        return [(best, float(vector[best])) for vector, best in zip(vectors, places, strict=True)]

    def second_largest(self, vector: Float32Array, best: int) -> float | None:
        """See ``LogitsOps``."""
        parts = vector[:best], vector[best + 1 :]
        return max(float(part.max(initial=-np.inf)) for part in parts)

    def top_k(self, vectors: Sequence[Float32Array], count: int) -> Int64Array:
        """See ``LogitsOps``."""
        return np.stack([top_ids(vector, count) for vector in vectors])

    def gather(self, vectors: Sequence[Float32Array], ids: Int64Array) -> Float64Array:
        """See ``LogitsOps``."""
        values = [vector[row] for vector, row in zip(vectors, ids, strict=True)]
        return np.stack(values).astype(np.float64)

    def log_normalizers(
        self, vectors: Sequence[Float32Array], temperatures: Sequence[float]
    ) -> Float64Array:
        """See ``LogitsOps``."""
        pairs = zip(vectors, temperatures, strict=True)
        return np.array([_log_normalizer(vector, temperature) for vector, temperature in pairs])

    def draw(
        self,
        vectors: Sequence[Float32Array],
        temperatures: Sequence[float],
        draws: Sequence[float],
    ) -> list[int]:
        """See ``LogitsOps``."""
        rows = zip(vectors, temperatures, draws, strict=True)
        return [
            _draw(_powers(vector, vector.max(), temperature), draw)
            for vector, temperature, draw in rows
        ]


NUMPY_LOGITS = NumpyLogits()


def _powers(vector: Float32Array, largest: np.float32, temperature: float) -> Float32Array:
    """Return exp((vector - largest) / temperature), a new array."""
    powers: Float32Array = vector - largest
    if temperature != 1.0:
        powers /= np.float32(temperature)
    np.exp(powers, out=powers)
    return powers


def _log_normalizer(vector: Float32Array, temperature: float) -> float:
    largest = vector.max()
    total = float(_powers(vector, largest, temperature).sum())
    return float(largest) / temperature + math.log(total)


def _draw(weights: Float32Array, draw: float) -> int:
    """Return the first place at which the cumulative sum of [n] weights exceeds its share ``draw``.

    Blocks are summed first, so that the cumulative sum in float64 is over one block only.
    """
    starts = np.arange(0, len(weights), _BLOCK)
    cumulative = np.add.reduceat(weights, starts).cumsum(dtype=np.float64)
    target = draw * cumulative[-1]
    block = int(cumulative.searchsorted(target, side="right"))
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.float64)
    before = cumulative[block - 1] if block else 0.0
    place = int(inside.searchsorted(target - before, side="right"))
    # The block's own sum, rounded otherwise, may be less: then it is the last that has a weight.
    last = int(inside.searchsorted(inside[-1]))
    return block * _BLOCK + min(place, last)


def top_ids(row: Float32Array, count: int) -> Int64Array:
    """Return the indices of the ``count`` largest values, ascending.

    The row is folded into columns of FOLDS values. The ``count``-th largest of the columns' maxima
    can't exceed the ``count``-th largest value, so smaller values need no further look.

    Args:
        row: [n] float32.
        count: number of indices.
    """
    columns = len(row) // FOLDS
    candidates: Int64Array = np.arange(len(row))
    if count <= columns:
        maxima = row[: columns * FOLDS].reshape(FOLDS, columns).max(0)
        threshold = np.partition(maxima, columns - count)[columns - count]
        candidates = np.flatnonzero(row >= threshold)
    if len(candidates) > count:
        order = np.argpartition(row[candidates], len(candidates) - count)
        candidates = np.sort(candidates[order[len(candidates) - count :]])
    return candidates
