"""Filters: which tokens stay possible, and the one a draw falls on. Arrays of one row each."""

import numpy as np
import numpy.typing as npt

from midfill.engine.request import EngineSamplingParams

FOLDS = 64
"""``largest`` pays where a row is so many times longer than what is wanted of it."""
_BINS = 1024

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


def largest(row: npt.NDArray[np.float32], count: int) -> Int64Array:
    """Indices of the ``count`` largest values, ascending; several times as fast as topk.

    The row is folded into columns of FOLDS values. The ``count``-th largest of the columns'
    maxima can't be above the ``count``-th largest value, so nothing below it is looked at again.
    """
    columns = len(row) // FOLDS
    maxima = row[: columns * FOLDS].reshape(FOLDS, columns).max(0)
    threshold = np.partition(maxima, columns - count)[columns - count]
    candidates = np.flatnonzero(row >= threshold)
    if len(candidates) > count:
        order = np.argpartition(row[candidates], len(candidates) - count)
        candidates = np.sort(candidates[order[len(candidates) - count :]])
    return candidates


def keep_likely(
    weights: Float64Array, params: EngineSamplingParams, complete: bool
) -> Float64Array | None:
    """Apply top-p, min-p and typical-p.

    Args:
        weights: [n] float64 probabilities of the n likeliest tokens, in any order.
        params: the filters.
        complete: whether no others are possible.

    Returns:
        [n] weights with the dropped ones at zero; None where tokens beyond these might have to be
        kept too.
    """
    least, most = weights.min(), weights.max()
    settled = complete or least == 0.0
    if params.top_p < 1.0:
        settled = settled or weights.sum() >= params.top_p
        # The logarithm spreads them evenly over the bins; no float32 is below the floor but 0.
        surprise = -np.log(np.maximum(weights, 1e-46))
        weights = _smallest_set(surprise, weights, params.top_p)
    if params.min_p > 0.0:
        settled = settled or least < params.min_p * most
        weights = np.where(weights >= params.min_p * most, weights, 0.0)
    if not settled:
        return None
    return _typical(weights, params.typical_p) if params.typical_p < 1.0 else weights


def _typical(weights: Float64Array, mass: float) -> Float64Array:
    """Locally typical sampling (Meister et al., "Locally Typical Sampling", TACL 2023).

    Keeps the smallest set of tokens whose surprise is closest to the entropy and whose
    probabilities add up to ``mass``; zeroes the others.
    """
    possible = np.flatnonzero(weights)
    probabilities = weights[possible] / weights.sum()
    surprise = -np.log(probabilities)
    entropy = probabilities @ surprise
    typical = np.zeros_like(weights)
    typical[possible] = _smallest_set(np.abs(surprise - entropy), probabilities, mass)
    return typical


def _smallest_set(keys: Float64Array, weights: Float64Array, mass: float) -> Float64Array:
    """Keep weights in ascending order of their keys until they add up to ``mass``, zero the rest.

    Large arrays are sorted into bins first; only the bin in which the mass is reached needs more.
    """
    lowest, highest = keys.min(), keys.max()
    bins = 1 if len(keys) <= _BINS or lowest == highest else _BINS
    place = ((keys - lowest) * ((bins - 1) / max(highest - lowest, 1e-300))).astype(np.int64)
    filled = np.bincount(place, weights, minlength=bins).cumsum()
    border = min(int(filled.searchsorted(mass)), bins - 1)
    inside = float(filled[border - 1]) if border else 0.0
    kept = np.where(place < border, weights, 0.0)
    undecided = np.flatnonzero(place == border)
    undecided = undecided[keys[undecided].argsort(kind="stable")]
    count = int(weights[undecided].cumsum().searchsorted(mass - inside)) + 1
    kept[undecided[:count]] = weights[undecided[:count]]
    return kept


def invert(weights: Float64Array, ids: Int64Array, draw: float) -> int:
    """The token where the cumulative distribution passes ``draw``, tokens taken in order of id.

    In order of probability, two nearly equal tokens could change places over a rounding error in
    the logits, and the draw would land on the other one. In float64 a draw below 1 times the total
    stays below the total, so there always is such a token.
    """
    cumulative = weights.cumsum()
    return int(ids[cumulative.searchsorted(draw * cumulative[-1], side="right")])
