"""Attention of packed rows to the KV of their slots, whatever their order, in Triton.

Flash attention over slots (Dao et al. 2022, arXiv 2205.14135), the keys of a row divided among
programs where there are few rows (Flash-Decoding, 2023), and the query heads that share a KV head
computed together.
"""

import torch
import triton
import triton.language as tl

from midfill.runners.torch.kernels.step_inputs import StepInputs

_QUERIES = 64
"""Queries (rows times the query heads of a KV head) of a program, at most."""
_KEYS = 64
"""Keys that a program reads at a time; half as many of wide heads."""
_WIDE = 128
_WARPS, _STAGES = 4, 2
_NARROW, _NARROW_STAGES = 64, 3
"""One row's narrow heads are read further ahead."""
_MAX_PARTS = 32
_PROGRAMS_PER_PROCESSOR = 2


def rows_per_tile(group: int) -> int:
    """Return how many rows a program computes where a request has several.

    Args:
        group: query heads per KV head.
    """
    return max(_QUERIES // group, 1)


def attend_rows(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    inputs: StepInputs,
    window: int | None,
    scale: float,
    processors: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the attention of a step's rows in one layer.

    Args:
        queries: [rows, query_heads, head_dim], contiguous.
        keys, values: the layer's KV cache [slots, kv_heads, head_dim], the rows written.
        inputs: says which keys each row attends to.
        window: how many of its last keys a row sees; None is all.
        scale: factor of q.k.
        processors: of the GPU; with few rows, so many programs share the keys.
        sinks: [query_heads], scores that join the softmax without a value; None if there are none.

    Returns:
        [rows, query_heads, head_dim]; undefined for rows that see nothing.
    """
    rows, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    group, tile = heads // kv_heads, inputs.tile
    # Rows that share a tile are counted as if all tiles were full.
    busy = max(rows // tile, 1) * kv_heads
    parts = 1
    while parts < _MAX_PARTS and busy * parts < processors * _PROGRAMS_PER_PROCESSOR:
        parts *= 2
    outputs = torch.empty_like(queries)
    sums = peaks = outputs
    if parts > 1:
        sums = torch.empty(
            (rows, heads, parts, head_dim), dtype=torch.float32, device=queries.device
        )
        peaks = torch.empty((rows, heads, parts, 2), dtype=torch.float32, device=queries.device)
    width = triton.next_power_of_2(head_dim)
    sink = queries if sinks is None else sinks
    _attend[(rows, kv_heads, parts)](
        queries, keys, values, outputs, sums, peaks, sink,
        inputs.kv_slots, inputs.tile_rows, inputs.tile_sizes, inputs.tile_slots, inputs.seen,
        scale, window or 0, parts, keys.stride(0), keys.stride(1),
        HEADS=heads, GROUP=group, TILE=tile, HEAD_DIM=head_dim, WIDTH=width, DIVIDED=parts > 1,
        SINK=sinks is not None,
        QUERIES=max(triton.next_power_of_2(tile * group), 16),
        KEYS=_KEYS if width <= _WIDE else _KEYS // 2,
        num_warps=_WARPS,
        num_stages=_NARROW_STAGES if tile == 1 and width <= _NARROW else _STAGES,
    )  # fmt: skip
    if parts > 1:
        _merge[(rows, heads)](
            sums, peaks, outputs, sink, inputs.seen, parts,
            HEADS=heads, HEAD_DIM=head_dim, WIDTH=width, MOST=_MAX_PARTS,
            SINK=sinks is not None, num_warps=2,
        )  # fmt: skip
    return outputs


_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    queries, keys, values, outputs, sums, peaks, sinks,
    kv_slots, tile_rows, tile_sizes, tile_slots, seen,
    scale, window, parts, slot_stride, head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, DIVIDED: tl.constexpr, SINK: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Let one tile's queries of one KV head attend to one part of their keys."""
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    size = tl.load(tile_sizes + tile)
    if size == 0:
        return
    query = tl.arange(0, QUERIES)
    offset = query // GROUP
    row = tl.load(tile_rows + tile) + offset
    head = kv_head * GROUP + query % GROUP
    real = (offset < size) & (offset < TILE)
    counts = tl.load(seen + row, mask=real, other=0)
    end = tl.max(counts, 0)
    firsts = tl.where(window > 0, tl.maximum(counts - window, 0), 0)
    begin = tl.min(tl.where(real, firsts, end), 0)
    share = tl.cdiv(tl.cdiv(end - begin, parts), KEYS) * KEYS
    begin += part * share
    end = tl.minimum(end, begin + share)

    number = tl.arange(0, WIDTH)
    inside = number < HEAD_DIM
    at = (row * HEADS + head).to(tl.int64) * HEAD_DIM
    q = tl.load(
        queries + at[:, None] + number[None, :], mask=real[:, None] & inside[None, :], other=0.0
    )
    slots = kv_slots + tl.load(tile_slots + tile)
    head_keys, head_values = keys + kv_head * head_stride, values + kv_head * head_stride
    factor = scale * _LOG2_E  # of powers of 2, which are faster than those of e
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([QUERIES, WIDTH], tl.float32)
    # Keys that all queries see need no comparisons.
    common = tl.where(window > 0, 0, tl.min(tl.where(real, counts, end), 0))
    common = begin + tl.maximum(tl.minimum(common, end) - begin, 0) // KEYS * KEYS
    for first in range(begin, common, KEYS):
        peak, total, summed = _read_keys(
            q, head_keys, head_values, slots, first, end, counts, firsts, slot_stride, factor,
            peak, total, summed, number, inside, KEYS, False,
        )  # fmt: skip
    for first in range(common, end, KEYS):
        peak, total, summed = _read_keys(
            q, head_keys, head_values, slots, first, end, counts, firsts, slot_stride, factor,
            peak, total, summed, number, inside, KEYS, True,
        )  # fmt: skip

    if not DIVIDED:
        if SINK:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * _LOG2_E
            total += tl.exp2(sink - peak)
        attended = summed / total[:, None]
        tl.store(
            outputs + at[:, None] + number[None, :], attended.to(outputs.dtype.element_ty),
            mask=real[:, None] & inside[None, :],
        )  # fmt: skip
    else:
        piece = (row * HEADS + head).to(tl.int64) * parts + part
        tl.store(
            sums + piece[:, None] * HEAD_DIM + number[None, :], summed,
            mask=real[:, None] & inside[None, :],
        )  # fmt: skip
        tl.store(peaks + piece * 2, peak, mask=real)
        tl.store(peaks + piece * 2 + 1, total, mask=real)


@triton.jit
def _read_keys(
    q, keys, values, slots, first, end, counts, firsts, slot_stride, factor,
    peak, total, summed, number, inside, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add some keys to the running softmax of a tile's queries; peaks are powers of 2."""
    key = first + tl.arange(0, KEYS)
    if MASKED:
        slot = tl.load(slots + key, mask=key < end, other=0).to(tl.int64)
    else:
        slot = tl.load(slots + key).to(tl.int64)
    place = slot * slot_stride
    k = tl.load(keys + place[None, :] + number[:, None], mask=inside[:, None], other=0.0)
    scores = tl.dot(q, k, input_precision="ieee") * factor
    if MASKED:
        visible = (key[None, :] < counts[:, None]) & (key[None, :] >= firsts[:, None])
        scores = tl.where(visible & (key < end)[None, :], scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    # A query that has seen nothing yet has no peak.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    v = tl.load(values + place[:, None] + number[None, :], mask=inside[None, :], other=0.0)
    summed = summed * shrink[:, None]
    summed += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, total * shrink + tl.sum(weights, 1), summed


@triton.jit
def _merge(
    sums, peaks, outputs, sinks, seen, parts,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr,
    SINK: tl.constexpr,
):  # fmt: skip
    """Join the parts of one row and query head."""
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(seen + row) == 0:
        return
    part, number = tl.arange(0, MOST), tl.arange(0, WIDTH)
    there, inside = part < parts, number < HEAD_DIM
    piece = (row * HEADS + head).to(tl.int64) * parts + part
    peak = tl.load(peaks + piece * 2, mask=there, other=float("-inf"))
    highest = tl.max(peak, 0)
    factor = tl.exp2(peak - highest)
    total = tl.sum(factor * tl.load(peaks + piece * 2 + 1, mask=there, other=0.0), 0)
    if SINK:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * _LOG2_E - highest)
    summed = tl.load(
        sums + piece[:, None] * HEAD_DIM + number[None, :],
        mask=there[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    attended = tl.sum(summed * factor[:, None], 0) / total
    at = (row * HEADS + head).to(tl.int64) * HEAD_DIM
    tl.store(outputs + at + number, attended.to(outputs.dtype.element_ty), mask=inside)
