"""Summaries of pages of keys: each channel's least and greatest number, in the KV cache's dtype.

The numbers are those of keys as they are stored, after the rotary embedding, so nothing is rounded.
Summaries lie in the order [layers, kv_heads, pages, 2, head_dim].
"""

from midfill.kernels.cpu.attention_parts import AttentionParts
from midfill.kernels.cpu.jit import inlined_kernel, kernel
from midfill.kernels.cpu.kv_cache import KVArray, LayerKV, load_entry, store_entry
from midfill.kernels.cpu.memory import Float32Array
from midfill.kernels.cpu.ragged_cells import HeadKeys
from midfill.kernels.cpu.simd import (
    LANES,
    fma,
    load,
    maximum,
    splat,
    store,
    sum_lanes,
    where_larger,
)


@inlined_kernel
def key_cell(parts: AttentionParts, head: HeadKeys, number: int) -> int:
    """Return the cell of a key of a part's head, by its number."""
    if number < head.cells:
        return int(parts.ragged.cells[head.cells_at + number])
    return head.base + int(parts.kv_slots[head.slots_at + number - head.cells])


@inlined_kernel
def summary_at(parts: AttentionParts, kv: LayerKV, head: HeadKeys, page: int, dim: int) -> int:
    """Return where the summary of a page starts in ``parts.selector.summaries``."""
    place = head.base // kv.slots * parts.selector.capacity + page
    return place * 2 * dim


@kernel
def summarize_keys(
    parts: AttentionParts, kv: LayerKV, head: HeadKeys, first: int, count: int, dim: int, at: int
) -> None:
    """Write the summary of keys first <= i < first + count of a head to summaries[at:]."""
    keys, summaries = kv.cache.keys, parts.selector.summaries
    for d in range(0, dim, LANES):
        low = load_entry(keys, key_cell(parts, head, first) * dim + d)
        high = low
        for number in range(first + 1, first + count):
            key = load_entry(keys, key_cell(parts, head, number) * dim + d)
            low = where_larger(low, key, key, low)
            high = maximum(high, key)
        store_entry(summaries, at + d, low)
        store_entry(summaries, at + dim + d, high)


@kernel
def split_query(
    query: Float32Array, query_at: int, dim: int, scratch: Float32Array, at: int
) -> None:
    """Write the negative numbers of a query to scratch[at:], the positive ones behind them.

    Each half is what the same half of a summary is multiplied with.
    """
    nothing = splat(0.0)
    for d in range(0, dim, LANES):
        x = load(query, query_at + d)
        store(scratch, at + d, where_larger(x, nothing, nothing, x))
        store(scratch, at + dim + d, maximum(x, nothing))


@kernel
def load_summary(summaries: KVArray, at: int, dim: int, scratch: Float32Array, to: int) -> None:
    """Write a summary's 2 * dim numbers as float32 to scratch[to:]."""
    for d in range(0, 2 * dim, LANES):
        store(scratch, to + d, load_entry(summaries, at + d))


@kernel
def bound_scores(scratch: Float32Array, query_at: int, summary_at: int, dim: int) -> float:
    """Return the most that q.k can be for any key of a page: sum of max(q * low, q * high)."""
    total = splat(0.0)
    for d in range(0, 2 * dim, LANES):
        total = fma(load(scratch, query_at + d), load(scratch, summary_at + d), total)
    return sum_lanes(total)
