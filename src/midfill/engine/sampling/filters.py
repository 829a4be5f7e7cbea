"""Sampling filters (top-k, top-p, min-p, typical-p) and the draw among what they keep.

Every function works on one row.
"""

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int64Array
from midfill.engine.request import EngineSamplingParams

FOLDS = 64
"""``top_ids`` pays for rows that are at least this many times as long as the number of ids."""
_BINS = 1024  # for sorting; see _smallest_set


def top_ids(row: Float32Array, count: int) -> Int64Array:
    """Return the indices of the ``count`` largest values, ascending; much faster than torch.topk.

    The row is folded into columns of FOLDS values. The ``count``-th largest of the columns' maxima
    can't exceed the ``count``-th largest value, so smaller values need no further look.

    Args:
        row: [n] float32, n at least ``count * FOLDS``.
        count: number of indices.
    """
    columns = len(row) // FOLDS
    maxima = row[: columns * FOLDS].reshape(FOLDS, columns).max(0)
    threshold = np.partition(maxima, columns - count)[columns - count]
    candidates = np.flatnonzero(row >= threshold)
    if len(candidates) > count:
        order = np.argpartition(row[candidates], len(candidates) - count)
        candidates = np.sort(candidates[order[len(candidates) - count :]])
    return candidates


def filter_probabilities(
    weights: Float64Array, params: EngineSamplingParams, complete: bool
) -> Float64Array | None:
    """Apply top-p, min-p and typical-p.

    Args:
        weights: [n] float64, probabilities of the n likeliest tokens, in any order.
        params: the filters' parameters.
        complete: whether no other tokens are possible.

    Returns:
        [n] float64, zero for dropped tokens; None if tokens beyond these n may have to be kept.
    """
    lowest, highest = weights.min(), weights.max()
    settled = complete or lowest == 0.0
    if params.top_p < 1.0:
        settled = settled or weights.sum() >= params.top_p
        # The logarithm spreads the weights evenly over the bins. Only 0 is below the floor.
        surprise = -np.log(np.maximum(weights, 1e-46))
        weights = _smallest_set(surprise, weights, params.top_p)
    if params.min_p > 0.0:
        settled = settled or lowest < params.min_p * highest
        weights = np.where(weights >= params.min_p * highest, weights, 0.0)
    if not settled:
        return None
    return _typical(weights, params.typical_p) if params.typical_p < 1.0 else weights


def _typical(weights: Float64Array, mass: float) -> Float64Array:
    """Apply locally typical sampling (Meister et al., "Locally Typical Sampling", TACL 2023).

    Return the weights of the smallest set of tokens whose surprise is closest to the entropy and
    whose probabilities add up to ``mass``, and zero for the others.
    """
    possible = np.flatnonzero(weights)
    probabilities = weights[possible] / weights.sum()
    surprise = -np.log(probabilities)
    entropy = probabilities @ surprise
    typical = np.zeros_like(weights)
    typical[possible] = _smallest_set(np.abs(surprise - entropy), probabilities, mass)
    return typical


def _smallest_set(keys: Float64Array, weights: Float64Array, mass: float) -> Float64Array:
    """Keep weights in ascending order of their keys until they add up to ``mass``; zero the rest.

    Large arrays are distributed over bins, and only the bin in which the mass is reached is sorted.
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


def sample_inverse(weights: Float64Array, ids: Int64Array, draw: float) -> int:
    """Return the token at which the cumulative distribution, in order of id, exceeds ``draw``.

    In order of probability, a rounding error in the logits could swap two nearly equal tokens, and
    the draw would select the other one. In float64 a draw below 1 times the total stays below the
    total, so there always is such a token.

    Args:
        weights: [n] float64, not normalised.
        ids: [n] token ids, ascending.
        draw: in [0, 1).
    """
    cumulative = weights.cumsum()
    return int(ids[cumulative.searchsorted(draw * cumulative[-1], side="right")])
