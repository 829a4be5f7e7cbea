"""Which experts a row is sent to, with what weights, and the rows of each expert."""

from typing import Any

import numpy as np

from midfill.kernels.cpu.experts.table import ExpertMemory, ExpertSizes, ExpertWeights
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.memory import Float32Array
from midfill.kernels.cpu.simd import (
    LANES,
    add,
    divide,
    exp,
    first_lane,
    keep_lanes,
    load,
    splat,
    store,
    subtract,
    sum_lanes,
)


@kernel
def _next_best(scores: Float32Array, at: int, count: int, last: int) -> int:
    """Return which score follows in descending order; of equal ones, the first comes first.

    Args:
        scores: of which those from ``at`` on are compared.
        at, count: which ones.
        last: the one that it follows; -1 at the start.

    Returns:
        -1 if there is none, which only scores that aren't numbers lead to.
    """
    best = -1
    for i in range(count):
        score = scores[at + i]
        if last >= 0:
            held = scores[at + last]
            if not (score < held or (score == held and i > last)):
                continue
        if best < 0 or score > scores[at + best]:
            best = i
    return best


@kernel
def _group_score(preferred: Float32Array, at: int, size: int, corrected: int) -> Any:
    """Return a group's largest score, or the sum of its two largest if they are corrected."""
    first = second = np.float32(-np.inf)
    for i in range(at, at + size):
        score = preferred[i]
        if score > first:
            first, second = score, first
        elif score > second:
            second = score
    return first + second if corrected != 0 and size > 1 else first


@kernel
def _leave_groups(sizes: ExpertSizes, preferred: Float32Array, at: int) -> None:
    """Set the scores of experts outside of the row's groups to -inf."""
    size, taken = sizes.experts // sizes.groups, 0
    for _ in range(sizes.groups_per_token):
        best, best_score = -1, np.float32(0.0)
        for group in range(sizes.groups):
            if (taken >> group) & 1 != 0:
                continue
            score = _group_score(preferred, at + group * size, size, sizes.corrected)
            if best < 0 or score > best_score:
                best, best_score = group, score
        taken |= 1 << best
    for i in range(sizes.experts):
        if (taken >> (i // size)) & 1 == 0:
            preferred[at + i] = np.float32(-np.inf)


@kernel
def _prefer(
    sizes: ExpertSizes, weights: ExpertWeights, memory: ExpertMemory, layer: int, at: int
) -> None:
    """Set the scores by which a row's experts are chosen, where they aren't the router's."""
    preferred, correction = memory.preferred, layer * sizes.experts
    for i in range(sizes.experts):
        score = memory.scores[at + i]
        if sizes.corrected != 0:
            score += weights.correction[correction + i]
        preferred[at + i] = score
    if sizes.groups > 1:
        _leave_groups(sizes, preferred, at)


@kernel
def _squash(scores: Float32Array, at: int, count: int) -> None:
    """Replace scores by their sigmoids."""
    one, zero = splat(np.float32(1.0)), splat(np.float32(0.0))
    for i in range(at, at + count, LANES):
        store(scores, i, divide(one, add(one, exp(subtract(zero, load(scores, i))))))


@kernel
def choose_experts(
    sizes: ExpertSizes, weights: ExpertWeights, memory: ExpertMemory, layer: int, row: int,
    stride: int,
) -> None:  # fmt: skip
    """Choose a row's experts by their scores, and compute their weights.

    Args:
        sizes: of the mixture.
        weights: of it.
        memory: with the row's scores, which become exponentials, or sigmoids.
        layer: number among those with experts.
        row: which one.
        stride: scores of a row.
    """
    scores, at = memory.scores, row * stride
    count, per_token = sizes.experts, sizes.per_token
    pair, weight = row * per_token, row * (per_token + 1)
    gated = sizes.shared_ffn > 0 and sizes.shared_gated != 0
    one = splat(np.float32(1.0))
    negated = splat(np.float32(0.0) - scores[at + count]) if gated else one
    if sizes.sigmoid != 0:
        _squash(scores, at, count)
    preferred = memory.scores
    if len(memory.preferred) > 0:
        _prefer(sizes, weights, memory, layer, at)
        preferred = memory.preferred
    last = -1
    for rank in range(per_token):
        last = _next_best(preferred, at, count, last)
        if last < 0:
            last = rank
        memory.chosen[pair + rank] = last
    total = np.float32(1.0) if sizes.sigmoid != 0 else _exponentials(memory, at, count, pair)
    if sizes.normalised != 0:
        total = np.float32(0.0)
        for rank in range(per_token):
            total += scores[at + memory.chosen[pair + rank]]
    factor = weights.weight_factor[0]
    for rank in range(per_token):
        share = scores[at + memory.chosen[pair + rank]] / total
        memory.weights[weight + rank] = share * factor
    opened = first_lane(divide(one, add(one, exp(negated))))
    memory.weights[weight + per_token] = opened if gated else np.float32(1.0)


@kernel
def _exponentials(memory: ExpertMemory, at: int, count: int, pair: int) -> Any:
    """Replace a row's scores by exponentials; return their sum."""
    scores = memory.scores
    largest = splat(scores[at + memory.chosen[pair]])
    sums = splat(np.float32(0.0))
    for i in range(0, count, LANES):
        powers = exp(subtract(load(scores, at + i), largest))
        store(scores, at + i, powers)
        sums = add(sums, keep_lanes(powers, 0, count - i, np.float32(0.0)))
    return np.float32(sum_lanes(sums))


@kernel
def sort_pairs(sizes: ExpertSizes, memory: ExpertMemory, rows: int) -> None:
    """Put the pairs of some rows in order."""
    pairs, starts, active = rows * sizes.per_token, memory.starts, 0
    starts[: sizes.experts + 1] = 0
    for pair in range(pairs):
        starts[memory.chosen[pair] + 1] += 1
    for expert in range(sizes.experts):
        if starts[expert + 1] > 0:
            memory.active[active] = expert
            active += 1
        starts[expert + 1] += starts[expert]
        memory.cursors[expert] = starts[expert]
    memory.active[sizes.experts] = active
    for pair in range(pairs):
        expert = memory.chosen[pair]
        place = memory.cursors[expert]
        memory.cursors[expert] = place + 1
        memory.places[pair] = place
        memory.ordered_rows[place] = pair // sizes.per_token
