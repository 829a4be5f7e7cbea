"""One segment of keys: scores of a tile of rows, and their weighted sum of V.

A tile of few rows reads K where it lies; for many rows keys are turned to panels first
(key_panels.py). V is always read where it lies. Rows are done some at a time, each group over
the whole segment, so that its sums stay in registers.
"""

from typing import Any

from midfill.kernels.cpu.cell_kernels import (
    score_keys_1,
    score_keys_2,
    score_keys_3,
    score_keys_4,
    weigh_values_1x32,
    weigh_values_1x64,
    weigh_values_2x32,
    weigh_values_2x64,
    weigh_values_3x32,
    weigh_values_3x64,
    weigh_values_4x32,
    weigh_values_4x64,
    weigh_values_5x32,
    weigh_values_5x64,
)
from midfill.kernels.cpu.cell_spans import CellSpan
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.key_panels import score_panel_3, score_panel_4, score_panel_5, turn_keys
from midfill.kernels.cpu.simd import LANES, load, multiply, store

SEGMENT = 256
"""Keys whose scores are kept at a time."""
FEW_ROWS = 8
"""Up to so many rows read keys where they lie."""


@kernel
def _rows_at_once(left: int) -> int:
    """How many of the rows that are left are done next: 4, or what lets no single one remain."""
    if left <= 5:
        return left
    return 3 if left == 6 else 4


@kernel
def _nothing(span: Any) -> Any:
    """A span of no cells."""
    return CellSpan(span.cells, span.base, span.slots, span.first, span.length * 0)


@kernel
def _score_in_place(
    queries: Any, rows: int, head_dim: int, keys: Any, ahead: Any, scores: Any
) -> None:
    row = 0
    while row < rows:
        query, to, stride = row * head_dim, row * SEGMENT, SEGMENT
        n = min(rows - row, 4) if rows - row != 5 else 3
        if n == 4:
            for key in range(0, keys.length, LANES):
                score_keys_4(queries, query, head_dim, keys, key, ahead, scores, to + key, stride)
        elif n == 3:
            for key in range(0, keys.length, LANES):
                score_keys_3(queries, query, head_dim, keys, key, ahead, scores, to + key, stride)
        elif n == 2:
            for key in range(0, keys.length, LANES):
                score_keys_2(queries, query, head_dim, keys, key, ahead, scores, to + key, stride)
        else:
            for key in range(0, keys.length, LANES):
                score_keys_1(queries, query, head_dim, keys, key, ahead, scores, to + key, stride)
        ahead = _nothing(ahead)
        row += n


@kernel
def _score_panel(
    queries: Any, first: int, rows: int, head_dim: int, panel: Any, scores: Any, at: int
) -> None:
    """scores[first:rows, 16] at ``at``; rows - first >= 3."""
    row = first
    while row < rows:
        n = _rows_at_once(rows - row)
        query, to = row * head_dim, at + row * SEGMENT
        if n == 4:
            score_panel_4(queries, query, head_dim, panel, scores, to, SEGMENT)
        elif n == 3:
            score_panel_3(queries, query, head_dim, panel, scores, to, SEGMENT)
        else:
            score_panel_5(queries, query, head_dim, panel, scores, to, SEGMENT)
        row += n


@kernel
def score_segment(
    queries: Any, rows: int, group: int, limit: int, head_dim: int, keys: Any, ahead: Any,
    panel: Any, scores: Any,
) -> None:  # fmt: skip
    """scores[rows, 256] = queries[rows, head_dim] times keys, at least where a row sees them.

    Row r sees keys up to limit + r // group (exclusive). panel: float32 [head_dim, 16], scratch.
    Cells of the span ``ahead`` are fetched meanwhile.
    """
    if rows <= FEW_ROWS:
        _score_in_place(queries, rows, head_dim, keys, ahead, scores)
        return
    for key in range(0, keys.length, LANES):
        turn_keys(keys, key, head_dim, ahead, panel)
        blind = max(0, key - limit + 1) * group
        _score_panel(queries, min(blind, rows - 3), rows, head_dim, panel, scores, key)


@kernel
def multiply_scales(
    scales: Any, base: int, slots: Any, first: int, count: int, gathered: Any, rows: int,
    scores: Any,
) -> None:  # fmt: skip
    """scores[rows, 256] *= scales of ``count`` slots, column by column."""
    for part in range(0, count, LANES):
        for j in range(LANES):
            gathered[j] = scales[base + slots[first + min(part + j, count - 1)]]
        factor = load(gathered, 0)
        for row in range(rows):
            at = row * SEGMENT + part
            store(scores, at, multiply(load(scores, at), factor))


def _weigher(one: Any, two: Any, three: Any, four: Any, five: Any) -> Any:
    """Make a kernel that takes the one of five generated for its number of rows."""

    @kernel
    def weigh(
        n: int, weights: Any, at: int, values: Any, first: int, end: int, head_dim: int, d: int,
        ahead: Any, sums: Any, to: int,
    ) -> None:  # fmt: skip
        """sums[n] at ``to`` = weights[n, first:end] at ``at`` @ the width of V from d on."""
        s = SEGMENT
        if n == 4:
            four(weights, at, s, values, first, end, head_dim, d, ahead, sums, to)
        elif n == 3:
            three(weights, at, s, values, first, end, head_dim, d, ahead, sums, to)
        elif n == 5:
            five(weights, at, s, values, first, end, head_dim, d, ahead, sums, to)
        elif n == 2:
            two(weights, at, s, values, first, end, head_dim, d, ahead, sums, to)
        else:
            one(weights, at, s, values, first, end, head_dim, d, ahead, sums, to)

    return weigh


_weigh_wide = _weigher(
    weigh_values_1x64, weigh_values_2x64, weigh_values_3x64, weigh_values_4x64, weigh_values_5x64
)
_weigh_narrow = _weigher(
    weigh_values_1x32, weigh_values_2x32, weigh_values_3x32, weigh_values_4x32, weigh_values_5x32
)


@kernel
def weigh_segment(
    weights: Any, rows: int, group: int, limit: int, window: int, head_dim: int, values: Any,
    ahead: Any, sums: Any, at: int,
) -> None:  # fmt: skip
    """sums[rows, head_dim] at ``at`` = weights[rows, 256] @ V.

    Row r sees keys up to limit + r // group (exclusive), and with a window only that many of the
    last ones; the weights of others are 0. Cells of the span ``ahead`` are fetched meanwhile.
    """
    row = 0
    while row < rows:
        n = _rows_at_once(rows - row)
        first = max(0, limit + row // group - window) if window > 0 else 0
        end = min(values.length, limit + (row + n - 1) // group)
        d = 0
        while d < head_dim:
            from_row, to = row * SEGMENT, at + row * head_dim + d
            if d + 64 <= head_dim:
                _weigh_wide(n, weights, from_row, values, first, end, head_dim, d, ahead, sums, to)
                d += 64
            else:
                _weigh_narrow(
                    n, weights, from_row, values, first, end, head_dim, d, ahead, sums, to
                )
                d += 32
            ahead = _nothing(ahead)
        row += n
