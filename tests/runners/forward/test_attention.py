"""Lists of spans: what a mask stands for, and everything."""

import numpy as np
import pytest

from midfill.runners.forward.attention import QUERY_BLOCK, SpanLists, query_blocks


def expanded(lists: SpanLists, unit: int) -> list[int]:
    spans = lists.spans[lists.indptr[unit] : lists.indptr[unit + 1]]
    return [key for start, end in spans.tolist() for key in range(start, end)]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_lists_of_a_mask_hold_its_keys_in_spans_apart(share: float) -> None:
    listed = np.random.default_rng(0).random((3, 2, 77)) < share
    lists = SpanLists.from_mask(listed)
    assert lists.indptr.dtype == lists.spans.dtype == np.int32
    for unit in range(6):
        assert expanded(lists, unit) == np.flatnonzero(listed.reshape(6, 77)[unit]).tolist()
        spans = lists.spans[lists.indptr[unit] : lists.indptr[unit + 1]]
        assert (spans[1:, 0] > spans[:-1, 1]).all()


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 130])
def test_lists_of_everything_end_with_each_blocks_last_row(rows: int) -> None:
    lists = SpanLists.of_everything(2, 10, rows)
    assert len(lists.indptr) - 1 == 2 * query_blocks(rows)
    for unit in range(2 * query_blocks(rows)):
        last = min(rows, (unit // 2 + 1) * QUERY_BLOCK)
        assert expanded(lists, unit) == list(range(10 + last))
