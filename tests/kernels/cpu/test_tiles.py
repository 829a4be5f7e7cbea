"""Tile rows: tiles cover all rows, as cheaply as any way of cutting them."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.kernels.cpu.tiles import MAX_TABLE_ROWS, TileRows, cheapest_tile_rows, even_tile_rows


def cut(heights: TileRows, rows: int) -> list[int]:
    """Return the tiles that so many rows are cut into."""
    tiles = []
    while rows:
        tiles.append(int(heights[min(rows, MAX_TABLE_ROWS)]))
        rows -= tiles[-1]
    return tiles


@pytest.mark.parametrize("tallest", [1, 4, 8])
def test_even_tiles(tallest: int) -> None:
    for rows in range(1, 200):
        tiles = cut(even_tile_rows(tallest), rows)
        assert sum(tiles) == rows
        assert max(tiles) <= tallest
        if rows <= MAX_TABLE_ROWS:
            assert len(tiles) == -(-rows // tallest)
            assert max(tiles) - min(tiles) <= 1
    assert cut(even_tile_rows(4), 5) == [3, 2]


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8), st.integers(1, 30))
def test_the_cheapest_tiles_cost_no_more_than_any_others(costs: list[float], rows: int) -> None:
    @cache
    def least(left: int) -> float:
        if left == 0:
            return 0.0
        return min(cost + least(left - tall) for tall, cost in enumerate(costs[:left], 1))

    tiles = cut(cheapest_tile_rows(costs), rows)
    assert sum(tiles) == rows
    assert sum(costs[tall - 1] for tall in tiles) == pytest.approx(least(rows))


def test_heights_without_a_tile_are_not_used() -> None:
    heights = cheapest_tile_rows([2.0, np.inf, 3.0, np.inf])
    assert sorted(cut(heights, 7)) == [1, 3, 3]
    assert set(np.unique(heights[1:])) == {1, 3}
