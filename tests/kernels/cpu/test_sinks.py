"""Attention sinks: a score of each head in the softmax, whichever way its keys are cut."""

from typing import Any

import numpy as np
import pytest

from midfill.kernels.cpu import attention, attention_metadata
from midfill.kernels.cpu.activations import Activations
from midfill.kernels.cpu.kv_cache import KVCache, LayerKV
from midfill.kernels.cpu.ragged_cells import pack_ragged
from midfill.kernels.cpu.segment_rows import SEGMENT
from midfill.kernels.cpu.sinks import SinkHeads
from midfill.kernels.cpu.softmax import SoftmaxSums
from midfill.kernels.cpu.standby import sync_size
from midfill.kernels.cpu.thread_pool import ThreadContext

HEADS, KV_HEADS, DIM, KEYS = 4, 2, 32, 600
GROUP, SCALE = HEADS // KV_HEADS, 0.3
SINKS = np.array([0.5, 3.0, -2.0, 8.0], np.float32)
RNG = np.random.default_rng(0)
K, V = (RNG.normal(size=(KV_HEADS, KEYS, DIM)).astype(np.float32) for _ in range(2))
QUERIES = RNG.normal(size=(3, HEADS, DIM)).astype(np.float32)


def one_thread() -> ThreadContext:
    return ThreadContext(0, 1, np.zeros(sync_size(1), np.int64), np.zeros((1, 16), np.int64))


def attend(
    sinks: np.ndarray | None, rows: int = 3, threads: int = 1, window: int = 0
) -> np.ndarray:
    """Attention of the last rows, [rows, HEADS, DIM]; many threads share a tile's segments."""
    none = np.zeros(0, np.float32)
    ends, all_keys = np.array([0, rows], np.int32), np.array([0, KEYS], np.int32)
    tiles = np.zeros((rows + 1, attention_metadata.TILE_FIELDS), np.int32)
    in_order, (ragged, most_cells) = np.zeros(0, np.int32), pack_ragged(())
    planned = attention_metadata.plan_attention(
        ends, all_keys, in_order, most_cells, GROUP, KV_HEADS, threads, tiles
    )
    metadata = attention_metadata.AttentionMetadata(
        ends, all_keys, np.arange(KEYS, dtype=np.int32), in_order, tiles, *planned, ragged
    )
    merged = attention_metadata.partial_rows(max(1, metadata.partials), GROUP, KV_HEADS)
    partials = SoftmaxSums(np.empty(merged * 2, np.float32), np.empty(merged * DIM, np.float32))
    heads: Any = attention_metadata.AttentionHeads(HEADS, KV_HEADS, GROUP, DIM, SCALE, window)
    if sinks is not None:  # those of a second layer
        both = np.append(np.full(HEADS, 5, np.float32), sinks)
        heads = SinkHeads(*heads, both, HEADS)
    out = np.full(rows * HEADS * DIM, np.nan, np.float32)
    attended = Activations(out, np.zeros(0, np.uint8))
    scratch = np.empty(attention.scratch_size(GROUP, DIM), np.float32)
    cells = np.zeros(2 * SEGMENT, np.int32)
    cache = KVCache(K.reshape(-1), V.reshape(-1), none, none)
    queries = attention.Queries(QUERIES[-rows:].reshape(-1).copy(), HEADS * DIM)
    attention.attend(
        one_thread(), queries, LayerKV(cache, KEYS, 0), heads, metadata, attended, scratch, cells,
        partials,
    )  # fmt: skip
    if metadata.partials:
        attention.merge_partials(
            one_thread(), cache.values, heads, metadata, attended, scratch, cells, partials
        )
    assert (metadata.partials > 0) == (threads > 1)
    return out.reshape(rows, HEADS, DIM)


def naive(sinks: np.ndarray, window: int = 0) -> np.ndarray:
    """One softmax per row and head, over its scores and the sink."""
    out = np.zeros(QUERIES.shape)
    for row, head in np.ndindex(*QUERIES.shape[:2]):
        end = KEYS - len(QUERIES) + row + 1
        seen = slice(max(0, end - window) if window else 0, end)
        keys, values = K[head // GROUP, seen], V[head // GROUP, seen]
        scores = np.append(keys @ QUERIES[row, head].astype(np.float64) * SCALE, sinks[head])
        weights = np.exp(scores - scores.max())
        out[row, head] = weights[:-1] @ values / weights.sum()
    return out


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("threads", [1, 1000])
def test_it_is_a_softmax_with_one_more_score(window: int, threads: int) -> None:
    found = attend(SINKS, threads=threads, window=window)
    np.testing.assert_allclose(found, naive(SINKS, window), atol=2e-6)


def test_a_row_has_the_same_bits_however_its_keys_are_cut() -> None:
    whole = attend(SINKS)
    np.testing.assert_array_equal(attend(SINKS, threads=1000), whole)
    np.testing.assert_array_equal(attend(SINKS, rows=1), whole[-1:])


def test_a_sink_that_weighs_nothing_gives_the_bits_of_attention_without() -> None:
    np.testing.assert_array_equal(attend(np.full(HEADS, -200, np.float32)), attend(None))


def test_a_sink_that_weighs_more_than_all_keys_leaves_nothing() -> None:
    found = attend(np.full(HEADS, 1000, np.float32))
    assert np.abs(found).max() < 1e-30
