"""Tile heights: how many rows a product takes at a time.

A tile's weights are read and unpacked once for all its rows, so a tall tile does less for each;
but it needs more registers than some chips have. Which height is fastest is measured, see
``models.tile_choice``. Results do not depend on it: a row is the same bit for bit in any tile.

A plan is a uint8 array [matrices, PLANNED_ROWS + 1]: the height of the first tile where so many
rows are left.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MATRICES = ("qkv", "output", "gate_up", "down", "head")
QKV_TILES, OUTPUT_TILES, GATE_UP_TILES, DOWN_TILES, HEAD_TILES = range(len(MATRICES))

PLANNED_ROWS = 48
"""With more rows left than that, the first tile is as with this many."""

Heights = npt.NDArray[np.uint8]


def even_heights(tallest: int) -> Heights:
    """[PLANNED_ROWS + 1]: as few tiles as can be, as even as can be."""
    heights = [0]
    for rows in range(1, PLANNED_ROWS + 1):
        tiles = -(-rows // tallest)
        heights.append(-(-rows // tiles))
    return np.array(heights, np.uint8)


def cheapest_heights(costs: Sequence[float]) -> Heights:
    """[PLANNED_ROWS + 1]: what takes the least time in all.

    Args:
        costs: of a tile with 1, 2, ... rows; infinite where there is none.
    """
    cheapest, heights = [0.0], [0]
    for rows in range(1, PLANNED_ROWS + 1):
        totals = [cost + cheapest[rows - height] for height, cost in enumerate(costs[:rows], 1)]
        best = min(range(len(totals)), key=totals.__getitem__)
        cheapest.append(totals[best])
        heights.append(best + 1)
    return np.array(heights, np.uint8)
