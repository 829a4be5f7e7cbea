"""A batch in the memory that kernels read: which rows share a tile, and what is padding."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.torch.kernels.step_inputs import InputBuffers, tiles_of

ROWS, SLOTS = 64, 512


def batch_of(requests: list[tuple[int, int]]) -> ForwardBatch:
    """Requests given as (new rows, tokens before them), with slots from 7 on."""
    rows = sum(count for count, _ in requests)
    lengths = [count + before for count, before in requests]
    return ForwardBatch(
        token_ids=np.arange(100, 100 + rows, dtype=np.int32),
        positions=np.arange(rows, dtype=np.int32),
        write_slots=np.arange(20, 20 + rows, dtype=np.int32),
        query_indptr=np.cumsum([0, *(count for count, _ in requests)]).astype(np.int32),
        kv_indptr=np.cumsum([0, *lengths]).astype(np.int32),
        kv_slots=np.arange(7, 7 + sum(lengths), dtype=np.int32),
        logit_rows=np.array([rows - 1], np.int32),
    )


requests_strategy = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 20)), min_size=1, max_size=5
)


@given(requests_strategy, st.integers(1, 9))
def test_every_row_is_in_one_tile_with_others_of_its_request(
    requests: list[tuple[int, int]], tile: int
) -> None:
    batch = batch_of(requests)
    found = []
    for first, size, slots in zip(*tiles_of(batch, tile), strict=True):
        assert 0 < size <= tile
        request = int(np.searchsorted(batch.query_indptr, first, side="right")) - 1
        assert first + size <= batch.query_indptr[request + 1]
        assert slots == batch.kv_indptr[request]
        found += range(first, first + size)
    assert found == list(range(batch.rows))


def test_what_is_left_of_an_earlier_batch_is_padding() -> None:
    buffers = InputBuffers(ROWS, SLOTS, torch.device("cpu"))
    buffers.load(batch_of([(20, 5), (1, 30)]), 24, 4)
    buffers.load(batch_of([(3, 2)]), 8, 4)
    inputs = buffers.inputs(8, 4)
    assert inputs.token_ids.tolist() == [100, 101, 102, 0, 0, 0, 0, 0]
    assert inputs.write_slots.tolist() == [20, 21, 22, -1, -1, -1, -1, -1]
    assert inputs.seen.tolist() == [3, 4, 5, 0, 0, 0, 0, 0]
    assert inputs.tile_sizes.tolist() == [3, 0, 0, 0, 0, 0, 0, 0]
    assert inputs.logit_rows.tolist() == [2, 0, 0, 0, 0, 0, 0, 0]
    assert inputs.kv_slots[:5].tolist() == [7, 8, 9, 10, 11]


def test_before_the_first_batch_nothing_is_written() -> None:
    inputs = InputBuffers(ROWS, SLOTS, torch.device("cpu")).inputs(ROWS, 1)
    assert set(inputs.write_slots.tolist()) == {-1}
    assert set(inputs.tile_sizes.tolist()) == {0}
