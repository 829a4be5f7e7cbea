"""Blocks of rows: when threads share the rows of a step instead of its matrices, and how evenly."""

import pytest

from midfill.kernels.cpu.row_blocks import MAX_BLOCK_ROWS, count_blocks


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_thread_gets_as_many_blocks_of_almost_the_same_size(threads: int) -> None:
    for rows in range(MAX_BLOCK_ROWS * threads, 40 * MAX_BLOCK_ROWS, 7):
        blocks = count_blocks(rows, threads)
        sizes = [(i + 1) * rows // blocks - i * rows // blocks for i in range(blocks)]
        assert blocks % threads == 0
        assert sum(sizes) == rows
        assert MAX_BLOCK_ROWS // 2 <= min(sizes) <= max(sizes) <= MAX_BLOCK_ROWS
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_all_threads_share_few_rows(threads: int) -> None:
    assert not any(count_blocks(rows, threads) for rows in range(MAX_BLOCK_ROWS * threads))
