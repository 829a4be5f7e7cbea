"""Attention over scattered slots against numpy, and independent of how work is cut."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from four_bit_entries import hadamard_matrix, rounded_to_int8, unpacked
from naive_attention import naive_attention, uniform_ragged_index

from midfill.kernels.cpu import attention, attention_metadata
from midfill.kernels.cpu.activations import Activations
from midfill.kernels.cpu.kv_cache import KVCache, KVCacheDtype, LayerKV, write_entry
from midfill.kernels.cpu.ragged_cells import pack_ragged
from midfill.kernels.cpu.segment_rows import SEGMENT
from midfill.kernels.cpu.softmax import SoftmaxSums
from midfill.kernels.cpu.standby import sync_size
from midfill.kernels.cpu.thread_pool import ThreadContext
from midfill.kv.ragged import KeyTerms, RaggedIndex
from midfill.runners.forward.attention import AttentionPlan
from midfill.runners.forward.batch import ForwardBatch

QUERY_HEADS, KV_HEADS, DIM = 6, 2, 32
GROUP = QUERY_HEADS // KV_HEADS
WIDTH = (QUERY_HEADS + 2 * KV_HEADS) * DIM


ROUNDED_WEIGHTS = 8e-3
"""Allowed where weights are rounded to bfloat16: by 1/512 of each, values being below 5."""
ROUNDED_GROUPS = 5e-2
"""Allowed where weights are rounded to int8: by 1/254 of the largest of 32."""


def as_floats(bfloats: np.ndarray) -> np.ndarray:
    return (bfloats.astype(np.int32) << 16).view(np.float32)


def tolerance(pool: "Pool", otherwise: float) -> float:
    if pool.is_four_bit:
        return ROUNDED_GROUPS
    return ROUNDED_WEIGHTS if pool.is_bfloat16 else otherwise


class Pool:
    """K and V of some slots, filled with noise and stored as ``kv_cache_dtype``.

    ``keys`` and ``values`` [slots, heads, dim] are what the cache stands for, after rounding.
    """

    def __init__(
        self, slots: int, kv_cache_dtype: KVCacheDtype = KVCacheDtype.F32,
        source: "Pool | None" = None, order: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(0)
        shape = (slots, KV_HEADS, DIM)
        exact = [rng.normal(size=shape).astype(np.float32) for _ in range(2)]
        if source is not None and order is not None:
            for mine, other in zip(exact, source.exact, strict=True):
                mine[: len(order)] = other[order]
        self.slots, self.exact = slots, exact
        self.cache = KVCache.allocate(kv_cache_dtype, slots * KV_HEADS, DIM)
        arrays = (
            (self.cache.keys, self.cache.key_scales),
            (self.cache.values, self.cache.value_scales),
        )
        for numbers, (entries, scales) in zip(exact, arrays, strict=True):
            for slot, head in np.ndindex(slots, KV_HEADS):
                number = head * slots + slot
                write_entry(numbers[slot, head].copy(), 0, DIM, entries, scales, number)
        self.keys, self.values = (self._as_float(*each) for each in arrays)

    @property
    def is_bfloat16(self) -> bool:
        return bool(self.cache.keys.dtype == np.int16)

    @property
    def is_four_bit(self) -> bool:
        return bool(self.cache.keys.dtype == np.uint8)

    def scaled(self, query: np.ndarray) -> np.ndarray:
        """Return a query times the score's factor, rounded as the kernels do."""
        scaled = query * np.float32(DIM**-0.5)
        if self.is_bfloat16:
            return torch.from_numpy(scaled).bfloat16().double().numpy()
        if self.is_four_bit:
            return rounded_to_int8(scaled @ hadamard_matrix(DIM)) @ hadamard_matrix(DIM)
        return query / np.sqrt(DIM)

    def _as_float(self, entries: np.ndarray, scales: np.ndarray) -> np.ndarray:
        if entries.dtype == np.uint16:
            entries = entries.view(np.float16)
        if entries.dtype == np.int16:
            entries = as_floats(entries)
        packed = entries.dtype == np.uint8
        if packed:
            entries = unpacked(entries)
        floats = entries.reshape(KV_HEADS, self.slots, DIM).astype(np.float64)
        if len(scales):
            floats *= scales.reshape(KV_HEADS, self.slots, 1)
        if packed:
            floats = floats @ hadamard_matrix(DIM)
        return floats.transpose(1, 0, 2)


def one_thread() -> ThreadContext:
    return ThreadContext(0, 1, np.zeros(sync_size(1), np.int64), np.zeros((1, 16), np.int64))


NO_QUANTS = np.zeros(0, np.uint8)
CELLS = np.zeros(2 * SEGMENT, np.int32)


def expected(
    pool: Pool,
    slots: np.ndarray,
    queries: np.ndarray,
    window: int = 0,
    index: RaggedIndex | None = None,
) -> np.ndarray:
    """Return what the definition gives for the last rows of a request with these slots."""
    rows, ends = np.arange(len(queries), dtype=np.int32), [0, len(queries)]
    batch = ForwardBatch(
        rows, rows, rows, np.array(ends, np.int32), np.array([0, len(slots)], np.int32),
        slots.astype(np.int32), rows[-1:], attention=(AttentionPlan(index),),
    )  # fmt: skip
    keys, values = (torch.from_numpy(part)[None] for part in (pool.keys, pool.values))
    scaled = torch.from_numpy(np.array([pool.scaled(row) for row in queries], np.float64))
    out = naive_attention(batch, 0, window or None, 1.0, scaled, keys, values)
    return out.reshape(len(queries), -1).numpy()


def attend(
    pool: Pool,
    requests: list[tuple[np.ndarray, np.ndarray]],
    *,
    window: int = 0,
    split: bool = False,
    indices: Sequence[RaggedIndex | None] = (),
    visible: Sequence[int] = (),
) -> np.ndarray:
    """requests: (slots, queries [rows, heads, dim]) each; all in one batch.

    visible: how many slots each row sees, where that isn't all up to its own.
    """
    rows = sum(len(queries) for _, queries in requests)
    qkv = np.zeros((rows, WIDTH), np.float32)
    qkv[:, : QUERY_HEADS * DIM] = np.concatenate([q for _, q in requests]).reshape(rows, -1)
    query_indptr = np.cumsum([0, *(len(q) for _, q in requests)]).astype(np.int32)
    kv_indptr = np.cumsum([0, *(len(s) for s, _ in requests)]).astype(np.int32)
    slots = np.concatenate([s for s, _ in requests]).astype(np.int32)
    tiles = np.zeros((rows + 1, attention_metadata.TILE_FIELDS), np.int32)
    threads = 10**6 if split else 1
    ragged, most_cells = pack_ragged(indices)
    seen = np.array(visible, np.int32)
    planned = attention_metadata.plan_attention(
        query_indptr, kv_indptr, seen, most_cells, GROUP, KV_HEADS, threads, tiles
    )
    metadata = attention_metadata.AttentionMetadata(
        query_indptr, kv_indptr, slots, seen, tiles, *planned, ragged
    )
    assert (metadata.partials > 0) == split
    merged = attention_metadata.partial_rows(max(1, metadata.partials), GROUP, KV_HEADS)
    partials = SoftmaxSums(np.empty(merged * 2, np.float32), np.empty(merged * DIM, np.float32))
    scratch = np.empty(attention.scratch_size(GROUP, DIM), np.float32)
    heads = attention_metadata.AttentionHeads(QUERY_HEADS, KV_HEADS, GROUP, DIM, DIM**-0.5, window)
    out = np.full((rows, QUERY_HEADS * DIM), np.nan, np.float32)
    attended = Activations(out.reshape(-1), NO_QUANTS)
    attention.attend(
        one_thread(), attention.Queries(qkv.reshape(-1), WIDTH),
        LayerKV(pool.cache, pool.slots, 0), heads, metadata, attended, scratch, CELLS, partials,
    )  # fmt: skip
    if metadata.partials:
        attention.merge_partials(
            one_thread(), pool.cache.values, heads, metadata, attended, scratch, CELLS, partials
        )
    return out


@pytest.mark.parametrize("kv_cache_dtype", [KVCacheDtype.F32, KVCacheDtype.BF16])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 14, 120])
def test_any_width_of_head_and_number_of_rows(
    kv_cache_dtype: KVCacheDtype, dim: int, rows: int
) -> None:
    rng = np.random.default_rng(dim + rows)
    # Numbers that bfloat16 holds, too.
    keys, values, query = (
        torch.from_numpy(rng.normal(size=shape)).bfloat16().float().numpy()
        for shape in ((300, dim), (300, dim), (rows, dim))
    )
    none = np.zeros(0, np.float32)
    tiles = np.zeros((2, attention_metadata.TILE_FIELDS), np.int32)
    one, all_keys = np.array([0, 1], np.int32), np.array([0, 300], np.int32)
    in_order = np.zeros(0, np.int32)
    ragged, most_cells = pack_ragged(())
    planned = attention_metadata.plan_attention(
        one, all_keys, in_order, most_cells, rows, 1, 1, tiles
    )
    out = np.empty(rows * dim, np.float32)
    cache = KVCache(keys.reshape(-1), values.reshape(-1), none, none)
    if kv_cache_dtype is KVCacheDtype.BF16:
        stored = [(part.view(np.int32) >> 16).astype(np.int16) for part in cache[:2]]
        cache = KVCache(stored[0], stored[1], none, none)
    attention.attend(
        one_thread(), attention.Queries(query.reshape(-1), rows * dim),
        LayerKV(cache, 300, 0),
        attention_metadata.AttentionHeads(rows, 1, rows, dim, 0.125, 0),
        attention_metadata.AttentionMetadata(
            one, all_keys, np.arange(300, dtype=np.int32), in_order, tiles, *planned, ragged
        ),
        Activations(out, NO_QUANTS), np.empty(attention.scratch_size(rows, dim), np.float32),
        CELLS, SoftmaxSums(none, none),
    )  # fmt: skip
    weights = np.exp(query.astype(np.float64) @ keys.T.astype(np.float64) * 0.125)
    expected = weights @ values / weights.sum(axis=1, keepdims=True)
    allowed = ROUNDED_WEIGHTS if kv_cache_dtype is KVCacheDtype.BF16 else 2e-6
    np.testing.assert_allclose(out.reshape(rows, dim), expected, atol=allowed)


def queries(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, QUERY_HEADS, DIM)).astype(np.float32)


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Pool:
    return Pool(1200, request.param)


@pytest.mark.parametrize("length", [1, 15, 64, 65, 256, 257, 700])
@pytest.mark.parametrize("window", [0, 1, 50, 300])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("pool", list(KVCacheDtype), indirect=True)
def test_equals_softmax_over_the_keys_a_row_may_see(
    pool: Pool, length: int, window: int, split: bool
) -> None:
    slots = np.random.default_rng(length).permutation(1200)[:length]
    rows = queries(min(length, 21), length)
    got = attend(pool, [(slots, rows)], window=window, split=split)
    np.testing.assert_allclose(got, expected(pool, slots, rows, window), atol=tolerance(pool, 2e-6))


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("pool", list(KVCacheDtype), indirect=True)
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


@pytest.mark.parametrize("kv_cache_dtype", list(KVCacheDtype))
def test_the_same_bits_in_a_batch_and_for_any_placement_of_slots(
    kv_cache_dtype: KVCacheDtype,
) -> None:
    pool = Pool(1500, kv_cache_dtype)
    order = np.random.default_rng(3).permutation(1500)
    long, short = queries(40, 4), queries(3, 5)
    apart = [attend(pool, [(order[:500], long)]), attend(pool, [(order[500:777], short)])]
    together = attend(pool, [(order[:500], long), (order[500:777], short)])
    np.testing.assert_array_equal(together, np.concatenate(apart))

    moved = Pool(1500, kv_cache_dtype, pool, order[:500])
    np.testing.assert_array_equal(attend(moved, [(np.arange(500), long)]), apart[0])


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("pool", list(KVCacheDtype), indirect=True)
def test_gathered_rows_have_the_bits_that_they_have_among_all_rows(
    pool: Pool, window: int, split: bool
) -> None:
    slots = np.random.default_rng(12).permutation(1200)[:700]
    rows = queries(700, 13)
    whole = attend(pool, [(slots, rows)], window=window)
    rng = np.random.default_rng(14)
    for count in (1, 2, 9, 70, 700):
        chosen = np.sort(rng.permutation(700)[:count])
        got = attend(pool, [(slots, rows[chosen])], window=window, split=split, visible=chosen + 1)
        np.testing.assert_array_equal(got, whole[chosen])


@pytest.mark.parametrize("pool", [KVCacheDtype.F16], indirect=True)
def test_gathered_rows_share_a_batch_with_others_and_see_cells(pool: Pool) -> None:
    rng = np.random.default_rng(15)
    index = ragged_index(pool, (30, 400), rng, terms=True)
    slots = [rng.permutation(1200)[:count] for count in (50, 300, 12)]
    rows = [queries(count, seed) for seed, count in enumerate((50, 300, 1))]
    chosen = [np.arange(50), np.array([3, 4, 250, 299]), np.array([11])]
    own = [rows[0], rows[1][chosen[1]], rows[2]]
    together = attend(
        pool, list(zip(slots, own, strict=True)), indices=[None, index, None],
        visible=np.concatenate(chosen) + 1,
    )  # fmt: skip
    apart = [
        attend(pool, [(slots[0], rows[0])]),
        attend(pool, [(slots[1], rows[1])], indices=[index])[chosen[1]],
        attend(pool, [(slots[2], rows[2])]),
    ]
    np.testing.assert_array_equal(together, np.concatenate(apart))


def ragged_index(
    pool: Pool, counts: Sequence[int], rng: np.random.Generator, *, terms: bool = False
) -> RaggedIndex:
    """Some cells for each head, from anywhere."""
    cells = [rng.permutation(KV_HEADS * pool.slots)[:count] for count in counts]
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    size = sum(counts)
    factors = [rng.uniform(0.5, 2, size).astype(np.float32) for _ in range(2)]
    bias = rng.normal(size=size).astype(np.float32)
    return RaggedIndex(
        np.concatenate(cells).astype(np.int32),
        indptr,
        KeyTerms(factors[0], bias, factors[1]) if terms else None,
    )


@pytest.mark.parametrize("counts", [(0, 5), (256, 255), (300, 17), (16, 600)])
@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("pool", list(KVCacheDtype), indirect=True)
def test_heads_see_their_own_cells_before_the_slots(
    pool: Pool, counts: tuple[int, int], terms: bool
) -> None:
    rng = np.random.default_rng(sum(counts))
    index = ragged_index(pool, counts, rng, terms=terms)
    for rows, split in itertools.product((1, 3, 40), (False, True)):
        slots, own = rng.permutation(pool.slots)[: rows + 7], queries(rows, rows)
        got = attend(pool, [(slots, own)], split=split, indices=[index])
        np.testing.assert_allclose(
            got, expected(pool, slots, own, index=index), atol=tolerance(pool, 4e-6)
        )


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("pool", list(KVCacheDtype), indirect=True)
def test_all_cells_give_the_bits_of_the_slots(pool: Pool, window: int) -> None:
    slots = np.random.default_rng(8).permutation(1200)[:600].astype(np.int32)
    rows = queries(9, 9)
    dense = attend(pool, [(slots, rows)], window=window)
    for kept, split in itertools.product((1, 256, 511, 590), (False, True)):
        index = uniform_ragged_index(slots[:kept], KV_HEADS, pool.slots)
        got = attend(pool, [(slots[kept:], rows)], window=window, split=split, indices=[index])
        np.testing.assert_array_equal(got, dense)


@pytest.mark.parametrize("pool", [KVCacheDtype.F16], indirect=True)
def test_requests_with_cells_and_without_share_a_batch(pool: Pool) -> None:
    rng = np.random.default_rng(11)
    plain, two = ragged_index(pool, (30, 400), rng), ragged_index(pool, (9, 2), rng, terms=True)
    indices = [None, plain, None, two]
    requests = [(rng.permutation(1200)[: rows + 20], queries(rows, rows)) for rows in (1, 5, 33, 2)]
    together = attend(pool, requests, indices=indices)
    apart = [
        attend(pool, [request], indices=[index] if index else [])
        for request, index in zip(requests, indices, strict=True)
    ]
    np.testing.assert_array_equal(together, np.concatenate(apart))
