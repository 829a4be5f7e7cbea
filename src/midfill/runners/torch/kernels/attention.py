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
) -> torch.Tensor:
    """Compute the attention of a step's rows in one layer.

    Args:
        queries: [rows, query_heads, head_dim], contiguous.
        keys, values: the layer's KV cache [slots, kv_heads, head_dim], the rows written.
        inputs: says which keys each row attends to.
        window: how many of its last keys a row sees; None is all.
        scale: factor of q.k.
        processors: of the GPU; with few rows, so many programs share the keys.

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
    sums = outputs
    peaks = outputs
    if parts > 1:
        sums = torch.empty(
            (rows, heads, parts, head_dim), dtype=torch.float32, device=queries.device
        )
        peaks = torch.empty((rows, heads, parts, 2), dtype=torch.float32, device=queries.device)
    width = triton.next_power_of_2(head_dim)
    _attend[(rows, kv_heads, parts)](
        queries, keys, values, outputs, sums, peaks,
        inputs.kv_slots, inputs.tile_rows, inputs.tile_sizes, inputs.tile_slots, inputs.seen,
        scale, window or 0, parts, keys.stride(0), keys.stride(1),
        HEADS=heads, GROUP=group, TILE=tile, HEAD_DIM=head_dim, WIDTH=width, DIVIDED=parts > 1,
        QUERIES=max(triton.next_power_of_2(tile * group), 16),
        KEYS=_KEYS if width <= _WIDE else _KEYS // 2,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    if parts > 1:
        _merge[(rows, heads)](
            sums, peaks, outputs, inputs.seen, parts,
            HEADS=heads, HEAD_DIM=head_dim, WIDTH=width, MOST=_MAX_PARTS, num_warps=2,
        )  # fmt: skip
    return outputs


@triton.jit
def _attend(
    queries, keys, values, outputs, sums, peaks,
    kv_slots, tile_rows, tile_sizes, tile_slots, seen,
    scale, window, parts, slot_stride, head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, DIVIDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
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
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([QUERIES, WIDTH], tl.float32)
    for first in range(begin, end, KEYS):
        key = first + tl.arange(0, KEYS)
        slot = tl.load(slots + key, mask=key < end, other=0).to(tl.int64)
        place = slot * slot_stride + kv_head * head_stride
        k = tl.load(
            keys + place[None, :] + number[:, None],
            mask=(key < end)[None, :] & inside[:, None], other=0.0,
        )  # fmt: skip
        scores = tl.dot(q, k, input_precision="ieee") * scale
        visible = (key[None, :] < counts[:, None]) & (key[None, :] >= firsts[:, None])
        scores = tl.where(visible & (key < end)[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        # A query that has seen nothing yet has no peak.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(
            values + place[:, None] + number[None, :],
            mask=(key < end)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        summed = summed * shrink[:, None]
        summed += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = higher

    if not DIVIDED:
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
def _merge(
    sums, peaks, outputs, seen, parts,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Join the parts of one row and query head."""
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(seen + row) == 0:
        return
    part, number = tl.arange(0, MOST), tl.arange(0, WIDTH)
    there, inside = part < parts, number < HEAD_DIM
    piece = (row * HEADS + head).to(tl.int64) * parts + part
    peak = tl.load(peaks + piece * 2, mask=there, other=float("-inf"))
    factor = tl.exp(peak - tl.max(peak, 0))
    total = tl.sum(factor * tl.load(peaks + piece * 2 + 1, mask=there, other=0.0), 0)
    summed = tl.load(
        sums + piece[:, None] * HEAD_DIM + number[None, :],
        mask=there[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    attended = tl.sum(summed * factor[:, None], 0) / total
    at = (row * HEADS + head).to(tl.int64) * HEAD_DIM
    tl.store(outputs + at + number, attended.to(outputs.dtype.element_ty), mask=inside)
