"""Attention over scattered slots against numpy, and independent of how work is cut."""

import itertools

import numpy as np
import pytest

from midfill.kernels.cpu import attention
from midfill.kernels.cpu.cells import CellFormat, allocate_cells, write_cell
from midfill.kernels.cpu.decoder import Cells
from midfill.kernels.cpu.team import SYNC_CELLS

QUERY_HEADS, KV_HEADS, DIM = 6, 2, 32
GROUP = QUERY_HEADS // KV_HEADS
WIDTH = (QUERY_HEADS + 2 * KV_HEADS) * DIM


class Pool:
    """K and V of some slots, filled with noise and kept as ``cell_format``.

    ``keys`` and ``values`` [slots, heads, dim] are what the cells stand for, after rounding.
    """

    def __init__(
        self, slots: int, cell_format: CellFormat = CellFormat.F32, source: "Pool | None" = None,
        order: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(0)
        shape = (slots, KV_HEADS, DIM)
        exact = [rng.normal(size=shape).astype(np.float32) for _ in range(2)]
        if source is not None and order is not None:
            for mine, other in zip(exact, source.exact, strict=True):
                mine[: len(order)] = other[order]
        self.slots, self.exact = slots, exact
        arrays = []
        for values in exact:
            cells, scales = allocate_cells(cell_format, slots * KV_HEADS, DIM)
            for slot, head in np.ndindex(slots, KV_HEADS):
                write_cell(values[slot, head], 0, DIM, cells, scales, head * slots, slot)
            arrays.append((cells, scales))
        (keys, key_scales), (values, value_scales) = arrays
        self.cells = Cells(keys, values, key_scales, value_scales)
        self.keys, self.values = (self._as_float(*each) for each in arrays)

    def _as_float(self, cells: np.ndarray, scales: np.ndarray) -> np.ndarray:
        if cells.dtype == np.uint16:
            cells = cells.view(np.float16)
        floats = cells.reshape(KV_HEADS, self.slots, DIM).astype(np.float64)
        if len(scales):
            floats *= scales.reshape(KV_HEADS, self.slots, 1)
        return floats.transpose(1, 0, 2)


def naive(pool: Pool, slots: np.ndarray, queries: np.ndarray, window: int) -> np.ndarray:
    """queries: the last rows of a request whose keys are in ``slots``."""
    out = np.empty((len(queries), QUERY_HEADS, DIM))
    for i, row in enumerate(queries):
        end = len(slots) - len(queries) + i + 1
        seen = slots[max(0, end - window) if window else 0 : end]
        for head in range(QUERY_HEADS):
            scores = pool.keys[seen, head // GROUP] @ row[head] / np.sqrt(DIM)
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ pool.values[seen, head // GROUP] / weights.sum()
    return out.reshape(len(queries), -1)


def attend(
    pool: Pool,
    requests: list[tuple[np.ndarray, np.ndarray]],
    *,
    window: int = 0,
    split: bool = False,
) -> np.ndarray:
    """requests: (slots, queries [rows, heads, dim]) each; all in one batch."""
    rows = sum(len(queries) for _, queries in requests)
    qkv = np.zeros((rows, WIDTH), np.float32)
    qkv[:, : QUERY_HEADS * DIM] = np.concatenate([q for _, q in requests]).reshape(rows, -1)
    query_indptr = np.cumsum([0, *(len(q) for _, q in requests)]).astype(np.int32)
    kv_indptr = np.cumsum([0, *(len(s) for s, _ in requests)]).astype(np.int32)
    slots = np.concatenate([s for s, _ in requests]).astype(np.int32)
    items = np.zeros((rows + 1, attention.ITEM_FIELDS), np.int32)
    threads = 10**6 if split else 1
    tiles, partials = attention.plan_attention(
        query_indptr, kv_indptr, GROUP, KV_HEADS, threads, items
    )
    assert (partials > 0) == split
    entries = max(1, partials) * KV_HEADS * attention.TILE_ROWS
    state, sums = np.empty(entries * 2, np.float32), np.empty(entries * DIM, np.float32)
    scratch = np.empty(attention.scratch_size(GROUP, DIM), np.float32)
    out = np.full((rows, QUERY_HEADS * DIM), np.nan, np.float32)
    attention.attend(
        np.zeros(SYNC_CELLS, np.int64), items, tiles, partials, query_indptr, kv_indptr, slots,
        qkv.reshape(-1), WIDTH, pool.cells, 0, pool.slots, QUERY_HEADS, KV_HEADS, DIM, DIM**-0.5,
        window, out.reshape(-1), np.zeros(0, np.uint8), scratch, state, sums,
    )  # fmt: skip
    if partials:
        attention.merge_partials(
            np.zeros(SYNC_CELLS, np.int64), items, tiles, partials, QUERY_HEADS, KV_HEADS, DIM,
            out.reshape(-1), np.zeros(0, np.uint8), scratch, state, sums,
        )  # fmt: skip
    return out


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 14, 120])
def test_any_width_of_head_and_number_of_rows(dim: int, rows: int) -> None:
    rng = np.random.default_rng(dim + rows)
    keys, values = (rng.normal(size=(300, dim)).astype(np.float32) for _ in range(2))
    query = rng.normal(size=(rows, dim)).astype(np.float32)
    none = np.zeros(0, np.float32)
    items = np.zeros((2, attention.ITEM_FIELDS), np.int32)
    one, all_keys = np.array([0, 1], np.int32), np.array([0, 300], np.int32)
    attention.plan_attention(one, all_keys, rows, 1, 1, items)
    out = np.empty(rows * dim, np.float32)
    attention.attend(
        np.zeros(SYNC_CELLS, np.int64), items, 1, 0, one, all_keys, np.arange(300, dtype=np.int32),
        query.reshape(-1), rows * dim, Cells(keys.reshape(-1), values.reshape(-1), none, none), 0,
        300, rows, 1, dim, 0.1, 0, out, np.zeros(0, np.uint8),
        np.empty(attention.scratch_size(rows, dim), np.float32), none, none,
    )  # fmt: skip
    weights = np.exp(query.astype(np.float64) @ keys.T.astype(np.float64) * 0.1)
    expected = weights @ values / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out.reshape(rows, dim), expected, atol=2e-6)


def queries(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, QUERY_HEADS, DIM)).astype(np.float32)


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Pool:
    return Pool(1200, request.param)


@pytest.mark.parametrize("length", [1, 15, 64, 65, 256, 257, 700])
@pytest.mark.parametrize("window", [0, 1, 50, 300])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("pool", list(CellFormat), indirect=True)
def test_equals_softmax_over_the_keys_a_row_may_see(
    pool: Pool, length: int, window: int, split: bool
) -> None:
    slots = np.random.default_rng(length).permutation(1200)[:length]
    rows = queries(min(length, 21), length)
    got = attend(pool, [(slots, rows)], window=window, split=split)
    np.testing.assert_allclose(got, naive(pool, slots, rows, window), atol=2e-6)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("pool", list(CellFormat), indirect=True)
def test_the_same_bits_however_the_rows_are_cut_and_split(pool: Pool, window: int) -> None:
    slots = np.random.default_rng(1).permutation(1200)[:600]
    rows = queries(600, 2)
    whole = attend(pool, [(slots, rows)], window=window)
    for cuts in ([0, 1, 2, 599, 600], [0, 63, 64, 65, 300, 600], [0, 256, 512, 600]):
        for split in (False, True):
            parts = [
                attend(pool, [(slots[:end], rows[start:end])], window=window, split=split)
                for start, end in itertools.pairwise(cuts)
            ]
            np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("cell_format", list(CellFormat))
def test_the_same_bits_in_a_batch_and_for_any_placement_of_slots(cell_format: CellFormat) -> None:
    pool = Pool(1500, cell_format)
    order = np.random.default_rng(3).permutation(1500)
    long, short = queries(40, 4), queries(3, 5)
    apart = [attend(pool, [(order[:500], long)]), attend(pool, [(order[500:777], short)])]
    together = attend(pool, [(order[:500], long), (order[500:777], short)])
    np.testing.assert_array_equal(together, np.concatenate(apart))

    moved = Pool(1500, cell_format, pool, order[:500])
    np.testing.assert_array_equal(attend(moved, [(np.arange(500), long)]), apart[0])
