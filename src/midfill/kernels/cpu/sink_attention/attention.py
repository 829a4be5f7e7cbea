"""Attention with sinks: that of attention.py, but for the end of each row.

``heads`` are ``SinkHeads``, which the kernels of that file take like their own: it stays as it is,
so nothing is compiled anew for other models.
"""

from typing import Any

from midfill.kernels.cpu.activations import Activations, quantize
from midfill.kernels.cpu.attention import (
    Queries,
    _attend_segment,
    _attend_tile,
    _cut,
    _load_queries,
    _span,
)
from midfill.kernels.cpu.attention_metadata import (
    MAX_TILE_ROWS,
    PARTIAL,
    ROW,
    ROWS,
    AttentionMetadata,
    find_tile,
)
from midfill.kernels.cpu.jit import entry_point, in_child, inlined_kernel
from midfill.kernels.cpu.kv_cache import KVArray, LayerKV, transform_for
from midfill.kernels.cpu.memory import Float32Array, Int32Array
from midfill.kernels.cpu.segment_attention import prepare_queries
from midfill.kernels.cpu.segment_rows import SEGMENT
from midfill.kernels.cpu.sinks import add_sink
from midfill.kernels.cpu.softmax import SoftmaxSums, clear_states, finish_row, merge_rows
from midfill.kernels.cpu.thread_pool import ThreadContext, take_work


@inlined_kernel
def _finish_tile(
    values: KVArray, heads: Any, row: int, rows: int, head: int, totals: SoftmaxSums,
    out: Activations,
) -> None:  # fmt: skip
    """Write a tile's finished rows to out[batch rows, query_heads * head_dim]."""
    group, head_dim = heads.group, heads.head_dim
    for r in range(rows):
        query_head = head * group + r % group
        at = ((row + r // group) * heads.query_heads + query_head) * head_dim
        add_sink(heads, totals.states, r, query_head)
        finish_row(totals, r, head_dim, out.values, at)
        transform_for(values, out.values, at, head_dim)
        quantize(out, at, head_dim)


@in_child
@entry_point
def attend_with_sinks(
    context: ThreadContext, queries: Queries, kv: LayerKV, heads: Any,
    metadata: AttentionMetadata, out: Activations, scratch: Float32Array, cells: Int32Array,
    partials: SoftmaxSums,
) -> None:  # fmt: skip
    """Run the attention of one layer, as one phase; see ``attention.attend``.

    With ``metadata.partials``, ``merge_with_sinks`` must follow.
    """
    memory = _cut(scratch, cells, heads)
    units = metadata.partials if metadata.partials > 0 else metadata.tile_count
    count = units * heads.kv_heads
    work = take_work(context.sync, 1)
    while work < count:
        next_work = take_work(context.sync, 1)
        tile = find_tile(metadata, kv, heads, work)
        following = find_tile(metadata, kv, heads, min(next_work, count - 1))
        _load_queries(queries, heads, tile, memory.queries)
        prepare_queries(kv.cache.keys, memory.queries, tile.rows, heads.head_dim)
        if metadata.partials == 0:
            _attend_tile(kv, heads, metadata, tile, following, memory)
            _finish_tile(kv.cache.values, heads, tile.row, tile.rows, tile.head, memory.totals, out)
        else:
            first_row = work * max(MAX_TILE_ROWS, heads.group)
            if tile.first < tile.end:
                ahead = _span(
                    kv.cache.keys, heads.head_dim, metadata, following, following.first, cells,
                    SEGMENT,
                )  # fmt: skip
                _attend_segment(
                    kv, heads, metadata, tile, tile.first, ahead, memory, partials, first_row
                )
            else:
                clear_states(partials.states, first_row, tile.rows)
        work = next_work


@in_child
@entry_point
def merge_with_sinks(
    context: ThreadContext, values: KVArray, heads: Any, metadata: AttentionMetadata,
    out: Activations, scratch: Float32Array, cells: Int32Array, partials: SoftmaxSums,
) -> None:  # fmt: skip
    """Merge each tile's segments in order, as one phase; see ``attention.merge_partials``."""
    memory = _cut(scratch, cells, heads)
    tiles, kv_heads = metadata.tiles, heads.kv_heads
    work = take_work(context.sync, 1)
    while work < metadata.tile_count * kv_heads:
        head, tile = work % kv_heads, work // kv_heads
        rows = tiles[tile, ROWS] * heads.group
        first = tiles[tile, PARTIAL]
        end = tiles[tile + 1, PARTIAL] if tile + 1 < metadata.tile_count else metadata.partials
        clear_states(memory.totals.states, 0, rows)
        for partial in range(first, end):
            first_row = (partial * kv_heads + head) * max(MAX_TILE_ROWS, heads.group)
            merge_rows(memory.totals, partials, first_row, rows, heads.head_dim)
        _finish_tile(values, heads, tiles[tile, ROW], rows, head, memory.totals, out)
        work = take_work(context.sync, 1)
