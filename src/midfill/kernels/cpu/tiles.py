"""Tile rows: how many rows a matrix product computes at a time, and how it prefetches weights.

A tile's weights are read and unpacked once for all its rows, so a tall tile does less work per
row. But it needs more registers, which some chips don't have. The fastest height is measured, see
``runners.cpu.autotune``; tiles of 16 and more rows of quants are computed on AMX. Results do not
depend on it: a row has the same bits in any tile.

How weights are best prefetched differs from chip to chip, too. On Zen 4, prefetching into the
first-level cache makes a decode step a quarter slower than none does.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from midfill.kernels.cpu.memory import Uint8Array

MATRICES = ("qkv", "output", "gate_up", "down", "head")
QKV_TILES, OUTPUT_TILES, GATE_UP_TILES, DOWN_TILES, HEAD_TILES = range(len(MATRICES))

MAX_TABLE_ROWS = 48
"""With more rows left than this, the next tile is chosen as for this many."""

TileRows = Uint8Array
"""uint8 [MAX_TABLE_ROWS + 1] per matrix: the rows of the next tile, by the number of rows left.

The entry for no rows, ``PREFETCH``, is a ``Prefetch``.
"""

PREFETCH = 0


class Prefetch(IntEnum):
    """How the first tile of a panel, which reads it from memory, prefetches what it reads soon."""

    NONE = 0
    L1 = 1
    L2 = 2


DEFAULT_PREFETCH = Prefetch.NONE
"""Used until others were measured to be faster."""


def even_tile_rows(tallest: int) -> TileRows:
    """Return tiles as few and as even as possible: [MAX_TABLE_ROWS + 1]."""
    heights = [int(DEFAULT_PREFETCH)]
    for rows in range(1, MAX_TABLE_ROWS + 1):
        tiles = -(-rows // tallest)
        heights.append(-(-rows // tiles))
    return np.array(heights, np.uint8)


def cheapest_tile_rows(costs: Sequence[float]) -> TileRows:
    """Return the tiles that take the least time in total: [MAX_TABLE_ROWS + 1].

    Args:
        costs: of one tile with 1, 2, ... rows; infinite where there is no such tile.
    """
    cheapest, heights = [0.0], [int(DEFAULT_PREFETCH)]
    for rows in range(1, MAX_TABLE_ROWS + 1):
        totals = [cost + cheapest[rows - height] for height, cost in enumerate(costs[:rows], 1)]
        best = min(range(len(totals)), key=totals.__getitem__)
        cheapest.append(totals[best])
        heights.append(best + 1)
    return np.array(heights, np.uint8)
