"""Which experts a row is sent to, with what weights, and the rows of each expert."""

import numpy as np

from midfill.kernels.cpu.experts.table import ExpertMemory, ExpertSizes
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.memory import Float32Array
from midfill.kernels.cpu.simd import (
    LANES,
    add,
    divide,
    exp,
    keep_lanes,
    load,
    max_lanes,
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
def choose_experts(sizes: ExpertSizes, memory: ExpertMemory, row: int, stride: int) -> None:
    """Choose a row's experts by their scores, and compute their weights.

    Args:
        sizes: of the mixture.
        memory: with the row's scores, which become exponentials.
        row: which one.
        stride: scores of a row.
    """
    scores, at = memory.scores, row * stride
    count, per_token = sizes.experts, sizes.per_token
    pair, weight = row * per_token, row * (per_token + 1)
    last = -1
    for rank in range(per_token):
        last = _next_best(scores, at, count, last)
        if last < 0:
            last = rank
        memory.chosen[pair + rank] = last
    one = splat(np.float32(1.0))
    negated = splat(np.float32(0.0) - scores[at + count]) if sizes.shared_ffn > 0 else one
    largest = splat(scores[at + memory.chosen[pair]])
    sums = splat(np.float32(0.0))
    for i in range(0, count, LANES):
        powers = exp(subtract(load(scores, at + i), largest))
        store(scores, at + i, powers)
        sums = add(sums, keep_lanes(powers, 0, count - i, np.float32(0.0)))
    total = sum_lanes(sums)
    if sizes.normalised != 0:
        total = np.float32(0.0)
        for rank in range(per_token):
            total += scores[at + memory.chosen[pair + rank]]
    for rank in range(per_token):
        memory.weights[weight + rank] = scores[at + memory.chosen[pair + rank]] / total
    memory.weights[weight + per_token] = max_lanes(divide(one, add(one, exp(negated))))


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
