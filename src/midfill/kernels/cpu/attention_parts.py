"""What the forward pass hands to kernels of attention over parts (``parts``): numbers only.

Here, since the forward pass takes it in every step; the kernels themselves are compiled apart.
"""

from typing import NamedTuple

import numpy as np

from midfill.kernels.cpu.kv_cache import KVArray
from midfill.kernels.cpu.memory import (
    Float32Array,
    Float64Array,
    Int32Array,
    Int64Array,
    aligned_zeros,
)
from midfill.kernels.cpu.ragged_cells import RaggedCells

# Columns of AttentionParts.requests.
FIRST_ROW, ROWS, FIRST_PART, END_PART, LISTS, FIRST_UNIT, FIRST_PARTIAL, SEGMENTS = range(8)
REQUEST_FIELDS = 8
# Columns of AttentionParts.parts.
SLOTS_AT, VISIBLE_AT = 0, 1
PART_FIELDS = 2


class QuantizedTable(NamedTuple):
    """The quantised blocks of parts (``kv.quantized``).

    Attributes:
        first: int32 [parts], where in ``indptr`` a part's heads start, -1 if it has no blocks.
        indptr: int32, of one part after another: layers * kv_heads + 1 numbers of blocks each.
        table: int32 [blocks * BLOCK_FIELDS].
        cells: int32, what the blocks fill.
        kernel: address of what attends to a segment of their keys; 0 where there are none.
    """

    first: Int32Array
    indptr: Int32Array
    table: Int32Array
    cells: Int32Array
    kernel: int


class SelectorTable(NamedTuple):
    """What chooses, within the step and layer by layer, which keys some requests' rows attend to.

    Where there is one, its kernel writes the lists of these requests before a layer's attention.
    Such requests have a list per row and query head.

    Attributes:
        kernel: address of what chooses, see ``parts.page_selector``; 0 where nothing does.
        first: int32 [requests], where a request's record starts in ``numbers``, -1 if it has none;
            empty if no request has one.
        numbers: int32, records that the kernel reads, and writes its choices to.
        summaries: of pages of keys, as entries of the KV cache's dtype.
        capacity: of how many pages there are summaries in each layer and KV head.
        scores: float32, of pages; scratch that threads share.
    """

    kernel: int
    first: Int32Array
    numbers: Int32Array
    summaries: KVArray
    capacity: int
    scores: Float32Array


class AttentionParts(NamedTuple):
    """The requests of a batch whose rows attend to more than one part, or to listed keys.

    Attributes:
        requests: int32 [n * 8], per request: its first row in the batch, rows, its first part, the
            one after its last, where its lists start in ``indptr`` (-1: it has none), the number of
            its first unit of work, that of its first partial (-1: it has none), and how many
            segments its quantised keys make.
        parts: int32 [p * 2], per part: where its slots start in ``kv_slots``, and where its rows'
            counts start in ``visible``. A part's cells are those of its number in ``ragged``.
        factors: float64 [p * 2], per part: factor of q.k, and the power of its mass.
        kv_slots: int32, slots of all parts.
        visible: int32, how many of a part's slots each row of its request sees, ascending.
        ragged: the cells of each part, before its slots.
        quantized: the quantised keys of each part, before its cells.
        selector: what chooses the keys of some requests.
        indptr: int32, lists of query blocks and heads, see ``KeyLists``.
        spans: int32 [n * 2], see ``KeyLists``.
        pairs: int64, rows times listed keys of each list, over all layers of the call.
        partial_states, partial_sums: float32, softmax sums of segments that are computed on their
            own, see ``parts.attention``.
        scratch: float32 [threads, ...], see ``parts.keys.scratch_size``.
        numbers: int32 [threads, ...], see ``parts.keys.NUMBERS``.
    """

    requests: Int32Array
    parts: Int32Array
    factors: Float64Array
    kv_slots: Int32Array
    visible: Int32Array
    ragged: RaggedCells
    quantized: QuantizedTable
    selector: SelectorTable
    indptr: Int32Array
    spans: Int32Array
    pairs: Int64Array
    partial_states: Float32Array
    partial_sums: Float32Array
    scratch: Float32Array
    numbers: Int32Array


def no_parts(entries: KVArray) -> AttentionParts:
    """Return the parts of a batch whose requests all attend to their slots alone.

    Args:
        entries: of the KV cache, for their type.
    """
    integers = np.zeros(0, np.int32)
    ragged = RaggedCells(integers, integers, integers, np.zeros(0, np.float32))
    memory = (aligned_zeros((1, 0), kind) for kind in (np.float32, np.int32))
    quantized = QuantizedTable(integers, integers, integers, integers, 0)
    sums = np.zeros(0, np.float32)
    selector = SelectorTable(0, integers, integers, entries[:0], 0, sums)
    return AttentionParts(
        integers, integers, np.zeros(0, np.float64), integers, integers, ragged, quantized,
        selector, integers, integers, np.zeros(0, np.int64), sums, sums, *memory,
    )  # fmt: skip
