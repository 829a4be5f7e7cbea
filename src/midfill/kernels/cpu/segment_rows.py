"""The rows of a query tile, and which keys of a segment they see."""

from typing import NamedTuple

from midfill.kernels.cpu.jit import inlined_kernel, kernel
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.memory import Int32Array

SEGMENT = 256
"""Keys whose scores are kept at a time."""


class SegmentRows(NamedTuple):
    """The rows of a query tile, and which keys of a segment they see.

    Row r sees keys up to limit + r // group (exclusive), or up to ``limits`` where that says; with
    a window, only the last ``window`` of these. Keys are numbered from the segment's first.

    Attributes:
        total: the tile's query rows times ``group``.
        group: query heads per KV head.
        limit: keys that the first row sees; beyond 0..SEGMENT if it sees none, or all.
        window: of sliding-window attention; 0 is none.
        head_dim: elements of a query, key or value.
        limits: int32, of the batch's rows, ascending in the tile: row r sees keys up to
            limits[first + r // group] - start. Empty where the rows follow one another.
        first: the tile's first row in the batch.
        start: number, as ``limits`` counts, of the segment's first key.
    """

    total: int
    group: int
    limit: int
    window: int
    head_dim: int
    limits: Int32Array
    first: int
    start: int


@inlined_kernel
def keys_seen(rows: SegmentRows, row: int) -> int:
    """Return where the keys end that a row sees in the segment; outside 0..SEGMENT if it sees none
    of them, or all."""
    query = row // rows.group
    if len(rows.limits) == 0:
        return rows.limit + query
    return int(rows.limits[rows.first + query]) - rows.start


@kernel
def blind_rows(rows: SegmentRows, key: int) -> int:
    """Return how many rows, the first ones of the tile, don't see a key."""
    if len(rows.limits) == 0:
        return max(0, key - rows.limit + 1) * rows.group
    row = 0
    while row < rows.total and keys_seen(rows, row) <= key:
        row += rows.group
    return row


@inlined_kernel
def empty(span: KVSpan) -> KVSpan:
    """Return a span of no entries."""
    return KVSpan(span.entries, span.base, span.slots, span.first, span.length * 0)
