"""One segment of keys: scores of a tile of rows, and their weighted sum of V.

A tile of few rows reads K and V where they lie, once, and fetches what comes next meanwhile; for
many rows a block of cells is converted to float32 in cache-sized scratch first.
"""

from typing import Any

import numpy as np

from midfill.kernels.cpu.cell_kernels import (
    MAX_CELL_ROWS,
    add_values_1x32,
    add_values_1x64,
    add_values_2x32,
    add_values_2x64,
    add_values_3x32,
    add_values_3x64,
    add_values_4x32,
    add_values_4x64,
    prefetch_cell,
    score_keys_1,
    score_keys_2,
    score_keys_3,
    score_keys_4,
)
from midfill.kernels.cpu.cells import load_cell
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.simd import LANES, load, multiply, store

SEGMENT = 256
"""Keys whose scores are kept at a time."""
BLOCK = 64
"""Cells that are converted at a time."""
_FEW_ROWS = 8
"""Up to so many rows read cells in place."""
_AHEAD = 32
"""How many cells ahead of the ones in work are fetched."""
_IN_ORDER = np.arange(BLOCK, dtype=np.int32)
"""The slots of a block that was converted."""


@kernel
def _prefetch(cells: Any, base: int, slots: Any, first: int, count: int, head_dim: int) -> None:
    """Fetch up to 16 of the next ``count`` cells, if there are any."""
    for j in range(first, first + min(LANES, count)):
        prefetch_cell(cells, base + slots[j] * head_dim, head_dim)


@kernel
def _score_part(
    queries: Any, rows: int, head_dim: int, cells: Any, base: int, slots: Any, first: int,
    count: int, scores: Any, at: int,
) -> None:  # fmt: skip
    """scores[rows, 16], rows 256 apart from ``at`` on: queries times 16 keys, or ``count``."""
    row = 0
    while row < rows:
        n = min(MAX_CELL_ROWS, rows - row)
        query, to = row * head_dim, at + row * SEGMENT
        if n == 4:
            score_keys_4(
                queries, query, head_dim, cells, base, slots, first, count, scores, to, SEGMENT
            )
        elif n == 3:
            score_keys_3(
                queries, query, head_dim, cells, base, slots, first, count, scores, to, SEGMENT
            )
        elif n == 2:
            score_keys_2(
                queries, query, head_dim, cells, base, slots, first, count, scores, to, SEGMENT
            )
        else:
            score_keys_1(
                queries, query, head_dim, cells, base, slots, first, count, scores, to, SEGMENT
            )
        row += n


@kernel
def _add_rows(
    rows: int, wide: bool, weights: Any, at: int, cells: Any, base: int, slots: Any, key: int,
    keys: int, dim: int, sums: Any, to: int,
) -> None:  # fmt: skip
    """sums[rows, 64 or 32] at ``to`` += weights[rows, keys] at ``at`` @ V of ``keys`` slots."""
    if wide and rows == 4:
        add_values_4x64(weights, at, SEGMENT, cells, base, slots, key, keys, dim, sums, to)
    elif wide and rows == 3:
        add_values_3x64(weights, at, SEGMENT, cells, base, slots, key, keys, dim, sums, to)
    elif wide and rows == 2:
        add_values_2x64(weights, at, SEGMENT, cells, base, slots, key, keys, dim, sums, to)
    elif wide:
        add_values_1x64(weights, at, SEGMENT, cells, base, slots, key, keys, dim, sums, to)
    elif rows == 4:
        add_values_4x32(weights, at, SEGMENT, cells, base, slots, key, keys, dim, sums, to)
    elif rows == 3:
        add_values_3x32(weights, at, SEGMENT, cells, base, slots, key, keys, dim, sums, to)
    elif rows == 2:
        add_values_2x32(weights, at, SEGMENT, cells, base, slots, key, keys, dim, sums, to)
    else:
        add_values_1x32(weights, at, SEGMENT, cells, base, slots, key, keys, dim, sums, to)


@kernel
def _add_part(
    weights: Any, at: int, rows: int, head_dim: int, cells: Any, base: int, slots: Any, first: int,
    count: int, sums: Any,
) -> None:  # fmt: skip
    """sums[rows, head_dim] += weights[rows, count], rows 256 apart from ``at`` on, @ V."""
    d = 0
    while d < head_dim:
        wide = d + 64 <= head_dim
        row = 0
        while row < rows:
            n = min(MAX_CELL_ROWS, rows - row)
            _add_rows(
                n, wide, weights, at + row * SEGMENT, cells, base + d, slots, first, count,
                head_dim, sums, row * head_dim + d,
            )  # fmt: skip
            row += n
        d += 64 if wide else 32


@kernel
def _convert_block(
    cells: Any, base: int, slots: Any, first: int, count: int, head_dim: int, floats: Any
) -> None:
    """floats[count, head_dim] = the cells of ``count`` slots, codes without their scale."""
    for j in range(count):
        cell = base + slots[first + j] * head_dim
        for d in range(0, head_dim, LANES):
            store(floats, j * head_dim + d, load_cell(cells, cell + d))


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


@kernel
def score_segment(
    cells: Any, base: int, slots: Any, first: int, count: int, head_dim: int, queries: Any,
    rows: int, floats: Any, scores: Any,
) -> None:  # fmt: skip
    """scores[rows, 256] = queries[rows, head_dim] times the keys of ``count`` slots."""
    if rows > _FEW_ROWS:
        for block in range(0, count, BLOCK):
            keys = min(BLOCK, count - block)
            _convert_block(cells.keys, base, slots, first + block, keys, head_dim, floats)
            for part in range(0, keys, LANES):
                _score_part(
                    queries, rows, head_dim, floats, 0, _IN_ORDER, part, keys - part, scores,
                    block + part,
                )  # fmt: skip
        return
    for part in range(0, count, LANES):
        ahead = part + _AHEAD
        _prefetch(cells.keys, base, slots, first + ahead, count - ahead, head_dim)
        if ahead >= count:
            at = ahead - count
            _prefetch(cells.values, base, slots, first + at, count - at, head_dim)
        _score_part(
            queries, rows, head_dim, cells.keys, base, slots, first + part, count - part, scores,
            part,
        )  # fmt: skip


@kernel
def add_segment(
    cells: Any, base: int, slots: Any, first: int, count: int, behind: int, head_dim: int,
    weights: Any, rows: int, floats: Any, sums: Any,
) -> None:  # fmt: skip
    """sums[rows, head_dim] += weights[rows, count] @ V; ``behind`` slots follow these."""
    if rows > _FEW_ROWS:
        for block in range(0, count, BLOCK):
            values = min(BLOCK, count - block)
            _convert_block(cells.values, base, slots, first + block, values, head_dim, floats)
            _add_part(weights, block, rows, head_dim, floats, 0, _IN_ORDER, 0, values, sums)
        return
    for part in range(0, count, LANES):
        ahead = part + _AHEAD
        _prefetch(cells.values, base, slots, first + ahead, count - ahead, head_dim)
        if ahead >= count:
            _prefetch(cells.keys, base, slots, first + ahead, count + behind - ahead, head_dim)
        _add_part(
            weights, part, rows, head_dim, cells.values, base, slots, first + part,
            min(LANES, count - part), sums,
        )  # fmt: skip
