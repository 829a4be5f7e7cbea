"""How a batch's attention is cut into work: query tiles, and the segments of their keys.

A query tile is some rows of a request, with all query heads that share a KV head. Where few rows
meet a long context, the threads share a tile's segments: each (tile, segment) is a *partial*,
computed on its own and merged afterwards.
"""

from typing import NamedTuple

from midfill.kernels.cpu.jit import entry_point, inlined_kernel
from midfill.kernels.cpu.kv_cache import LayerKV
from midfill.kernels.cpu.memory import Int32Array
from midfill.kernels.cpu.ragged_cells import HeadKeys, RaggedCells, find_keys
from midfill.kernels.cpu.segment_rows import SEGMENT

MAX_TILE_ROWS = 96
"""Maximum query rows times group heads of a tile."""

# Columns of AttentionMetadata.tiles.
REQUEST, ROW, ROWS, PARTIAL = 0, 1, 2, 3
TILE_FIELDS = 4


class AttentionMetadata(NamedTuple):
    """Which query rows of a batch attend to which slots, and how the work is cut.

    Attributes:
        query_indptr, kv_indptr, kv_slots, visible_slots: of the ForwardBatch, int32.
        tiles: int32 [at least tile_count, 4], per query tile: request, first row of the batch,
            rows, and first partial.
        tile_count: tiles in use.
        partials: with too few tiles to keep the threads busy, the number of (tile, segment) pairs,
            each computed on its own and merged afterwards; else 0.
        ragged: the cells that requests see before their slots.
    """

    query_indptr: Int32Array
    kv_indptr: Int32Array
    kv_slots: Int32Array
    visible_slots: Int32Array
    tiles: Int32Array
    tile_count: int
    partials: int
    ragged: RaggedCells


class AttentionHeads(NamedTuple):
    """A layer's attention.

    Attributes:
        query_heads: of the model.
        kv_heads: of the model.
        group: query heads per KV head.
        head_dim: a multiple of 32.
        scale: factor of q.k.
        window: keys that a query sees, itself included; 0 is all.
    """

    query_heads: int
    kv_heads: int
    group: int
    head_dim: int
    scale: float
    window: int


class Tile(NamedTuple):
    """A unit of work: a query tile with one KV head, and segments of its keys.

    Attributes:
        row: the tile's first row in the batch.
        rows: query rows times the heads of a group; row r belongs to query row r // group.
        head: the KV head.
        keys: where the request's keys are.
        length: keys that the last row sees.
        limit: keys that the first row sees.
        first, end: the segments, without those that lie before every row's window.
    """

    row: int
    rows: int
    head: int
    keys: HeadKeys
    length: int
    limit: int
    first: int
    end: int


@entry_point
def plan_attention(
    query_indptr: Int32Array, kv_indptr: Int32Array, visible_slots: Int32Array,
    most_cells: Int32Array, group: int, kv_heads: int, threads: int, tiles: Int32Array,
) -> tuple[int, int]:  # fmt: skip
    """Cut the batch's rows into query tiles and fill ``tiles``.

    Args:
        query_indptr, kv_indptr, visible_slots: of the ForwardBatch.
        most_cells: int32 [requests], the most cells that a layer's head sees before the slots;
            empty if there are none.
        group: query heads per KV head.
        kv_heads: of the model.
        threads: that the step runs on.
        tiles: int32 [at least as many as rows, 4], see AttentionMetadata.

    Returns:
        tile_count and partials of AttentionMetadata.
    """
    widest = max(1, MAX_TILE_ROWS // group)
    count = 0
    partials = 0
    for request in range(len(query_indptr) - 1):
        row, end = query_indptr[request], query_indptr[request + 1]
        slots = kv_indptr[request + 1] - kv_indptr[request]
        cells = most_cells[request] if len(most_cells) > 0 else 0
        while row < end:
            rows = min(widest, end - row)
            tiles[count, REQUEST] = request
            tiles[count, ROW] = row
            tiles[count, ROWS] = rows
            tiles[count, PARTIAL] = partials
            seen = slots - (end - row - rows)
            if len(visible_slots) > 0:
                seen = visible_slots[row + rows - 1]
            keys = cells + seen
            partials += (keys + SEGMENT - 1) // SEGMENT
            count += 1
            row += rows
    if count * kv_heads >= 4 * threads or threads == 1:
        partials = 0
    return count, partials


def partial_rows(partials: int, group: int, kv_heads: int) -> int:
    """Return how many rows of SoftmaxSums ``attend`` needs for so many partials."""
    return partials * kv_heads * max(MAX_TILE_ROWS, group)


@inlined_kernel
def find_tile(metadata: AttentionMetadata, kv: LayerKV, heads: AttentionHeads, work: int) -> Tile:
    """Return unit ``work``: (tile, KV head), or (tile, segment, KV head) with partials."""
    tiles = metadata.tiles
    index, head = work // heads.kv_heads, work % heads.kv_heads
    part = 0
    if metadata.partials > 0:
        tile = metadata.tile_count - 1
        while tiles[tile, PARTIAL] > index:
            tile -= 1
        part = index - tiles[tile, PARTIAL]
    else:
        # A prompt's last tiles have the most keys; starting with them evens out the end.
        tile = metadata.tile_count - 1 - index
    request, row, count = tiles[tile, REQUEST], tiles[tile, ROW], tiles[tile, ROWS]
    keys = find_keys(metadata.ragged, request, kv, head, metadata.kv_indptr[request])
    behind = metadata.query_indptr[request + 1] - row
    slots = metadata.kv_indptr[request + 1] - keys.slots_at
    length = keys.cells + slots - behind + count
    limit = length - count + 1
    if len(metadata.visible_slots) > 0:
        length = keys.cells + int(metadata.visible_slots[row + count - 1])
        limit = keys.cells + int(metadata.visible_slots[row])
    first, end = 0, (length + SEGMENT - 1) // SEGMENT
    if heads.window > 0:
        first = max(0, limit - heads.window) // SEGMENT
    if metadata.partials > 0:
        # A head that keeps fewer cells than another has no keys in the last segments.
        first, end = max(first, part), min(end, part + 1)
    return Tile(row, count * heads.group, head, keys, length, limit, first, end)
