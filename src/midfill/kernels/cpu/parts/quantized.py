"""Quantised blocks (``kv.quantized``), decoded a few keys at a time to what kernels can read.

What a block holds is copied from its cells piece by piece, since these may lie anywhere; its codes
become numbers. From there on quantised keys are like any others. Only as many are decoded at a time
as fit the first-level cache.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from midfill.kernels.cpu.attention_parts import QuantizedTable
from midfill.kernels.cpu.halves import load_halves
from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated
from midfill.kernels.cpu.jit import inlined_kernel, kernel, kernel_by_number, kernel_by_type
from midfill.kernels.cpu.kv_cache import KVArray, KVCache, load_entry, store_entry
from midfill.kernels.cpu.memory import LINE, Float32Array, Int32Array
from midfill.kernels.cpu.simd import (
    F32_VECTOR,
    I8,
    I16,
    I32,
    I32_VECTOR,
    LANES,
    broadcast,
    f32x16,
    fma,
    llvm_call,
    load,
    load_unaligned,
    splat,
    store,
)
from midfill.kernels.cpu.softmax import SoftmaxSums
from midfill.kv.quantized import (
    BITS,
    BLOCK_FIELDS,
    BYTES_AT,
    CELLS_AT,
    CHANNEL_SCALE,
    CHANNEL_ZERO,
    CHANNELS,
    GROUPS,
    MAX_RANK,
    OUTLIERS,
    RANK,
    STREAM_FIELDS,
    STREAMS,
    TOKENS,
)

PIECE = 64
"""Keys that are decoded at a time."""
BLOCK_ROWS = 64
"""Rows of a query block, times the query heads that share a unit: ``BLOCK`` of keys.py."""
_OUTLIERS_AT_ONCE = 256
_HALF = 2
"""Bytes of a float16."""


class QuantizedScratch(NamedTuple):
    """A thread's memory for decoding a segment.

    Attributes:
        entries: float32 [PIECE * head_dim], room for keys or values.
        raw: float32 [PIECE * head_dim + 16], bytes of a block as they are copied.
        channels: float32 [2 * head_dim], scales and zeros of channels.
        basis: float32 [MAX_RANK * head_dim].
        tokens: float32 [PIECE * head_dim / 8], scales and zeros of tokens.
        coefficients: float32 [PIECE * MAX_RANK].
        piece: softmax sums of a piece, 64 rows.
    """

    entries: Float32Array
    raw: Float32Array
    channels: Float32Array
    basis: Float32Array
    tokens: Float32Array
    coefficients: Float32Array
    piece: SoftmaxSums


def quantized_scratch_size(head_dim: int) -> int:
    """Return how many float32 a thread needs."""
    numbers, rows = PIECE * head_dim, BLOCK_ROWS * (head_dim + 2)
    ranks = MAX_RANK * (head_dim + PIECE)
    return 2 * numbers + LANES + 2 * head_dim + numbers // 8 + ranks + rows


quantized_words = kernel(quantized_scratch_size)
"""``quantized_scratch_size`` for kernels."""


@kernel
def cut_quantized(memory: Float32Array, head_dim: int) -> QuantizedScratch:
    """Cut a thread's memory into its parts."""
    numbers, rows = PIECE * head_dim, BLOCK_ROWS * head_dim
    entries, rest = memory[:numbers], memory[numbers:]
    raw, rest = rest[: numbers + LANES], rest[numbers + LANES :]
    channels, rest = rest[: 2 * head_dim], rest[2 * head_dim :]
    basis, rest = rest[: MAX_RANK * head_dim], rest[MAX_RANK * head_dim :]
    tokens, rest = rest[: numbers // 8], rest[numbers // 8 :]
    coefficients, rest = rest[: PIECE * MAX_RANK], rest[PIECE * MAX_RANK :]
    piece = SoftmaxSums(rest[rows:], rest[:rows])
    return QuantizedScratch(entries, raw, channels, basis, tokens, coefficients, piece)


# ---- generated code --------------------------------------------------------------------------


def _byte_pointer(context: Any, builder: ir.IRBuilder, kind: Any, array: Any, at: Any) -> Any:
    """Return a pointer to byte ``at`` of an array of any type."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.gep(builder.bitcast(data, I8.as_pointer()), [at])


@generated(types.void, OWN, INDEX, OWN, INDEX, INDEX)
def _copy_bytes(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
    """Copy ``count`` bytes from byte ``at`` of an array to byte ``to`` of another.

    Arguments: (array, at, other, to, count).
    """
    array, at, other, to, count = arguments
    source = _byte_pointer(context, builder, kinds[0], array, at)
    target = _byte_pointer(context, builder, kinds[2], other, to)
    cgutils.raw_memcpy(builder, target, source, count, 1)


@generated(types.void, OWN, INDEX)
def _prefetch_line(context: Any, builder: Any, kinds: Any, array: Any, at: Any) -> None:
    """Prefetch the line of byte ``at`` of an array into the second-level cache."""
    pointer = _byte_pointer(context, builder, kinds[0], array, at)
    hints = [I32(hint) for hint in (0, 2, 1)]  # read, second level, data
    llvm_call(builder, "llvm.prefetch.p0", [pointer, *hints], ir.VoidType())


@generated(f32x16, OWN, INDEX)
def _load_halves(context: Any, builder: Any, kinds: Any, array: Any, at: Any) -> Any:
    """Load 16 float16 from byte ``at`` of an array, as float32."""
    return load_halves(context, builder, _byte_pointer(context, builder, kinds[0], array, at))


@generated(types.intp, OWN, INDEX)
def _load_place(context: Any, builder: Any, kinds: Any, array: Any, at: Any) -> Any:
    """Load a uint16 from byte ``at`` of an array."""
    pointer = _byte_pointer(context, builder, kinds[0], array, at)
    place = builder.load(builder.bitcast(pointer, I16.as_pointer()))
    place.align = 1
    return builder.zext(place, context.get_value_type(types.intp))


def _codes_of(width: int) -> Any:
    """Return a function that loads 16 codes of 1, 2, 4 or 8 bits as float32."""

    def load_codes(context: Any, builder: Any, kinds: Any, array: Any, at: Any) -> Any:
        pointer = _byte_pointer(context, builder, kinds[0], array, at)
        if width == 8:
            codes = load_unaligned(builder, pointer, ir.VectorType(I8, LANES))
            return builder.sitofp(builder.zext(codes, I32_VECTOR), F32_VECTOR)
        if width == 4:
            wide = ir.VectorType(I32, LANES // 2)
            pairs = load_unaligned(builder, pointer, ir.VectorType(I8, LANES // 2))
            pairs = builder.zext(pairs, wide)
            low = builder.and_(pairs, ir.Constant(wide, [15] * (LANES // 2)))
            high = builder.lshr(pairs, ir.Constant(wide, [4] * (LANES // 2)))
            every = ir.Constant(I32_VECTOR, list(range(LANES)))
            return builder.sitofp(builder.shuffle_vector(low, high, every), F32_VECTOR)
        word = builder.load(builder.bitcast(pointer, (I16 if width == 1 else I32).as_pointer()))
        word.align = 1
        spread = broadcast(builder, builder.zext(word, I32) if width == 1 else word)
        shifts = [lane * width for lane in range(LANES)]
        shifted = builder.lshr(spread, ir.Constant(I32_VECTOR, shifts))
        mask = ir.Constant(I32_VECTOR, [(1 << width) - 1] * LANES)
        return builder.sitofp(builder.and_(shifted, mask), F32_VECTOR)

    return generated(f32x16, OWN, INDEX)(load_codes)


_load_codes1, _load_codes2, _load_codes4, _load_codes8 = map(_codes_of, (1, 2, 4, 8))


def _entries_in(typing_context: Any, scratch: Any, entries: Any) -> Any:
    """Return scratch as what queries that were prepared for ``entries`` can be multiplied with.

    Those for bfloat16 are rounded to pairs and need the like; all others take float32.
    """
    if entries.dtype != types.int16:
        return scratch(scratch, entries), lambda _, __, ___, arguments: arguments[0]

    def view(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source = context.make_array(scratch)(context, builder, arguments[0])
        like = context.make_array(entries)(context, builder, arguments[1])
        found = context.make_array(entries)(context, builder)
        populate_array(
            found,
            data=builder.bitcast(source.data, like.data.type),
            shape=cgutils.unpack_tuple(builder, source.shape),
            strides=cgutils.unpack_tuple(builder, like.strides),
            itemsize=like.itemsize,
            meminfo=None,
        )
        return found._getvalue()

    return entries(scratch, entries), view


entries_in = intrinsic(_entries_in)

# ---- decoding --------------------------------------------------------------------------------


@kernel
def _copy(
    cache: KVCache, cells: Int32Array, half_bytes: int, at: int, count: int, raw: Float32Array,
    to: int,
) -> None:  # fmt: skip
    """Copy ``count`` bytes of a block, from byte ``at`` on, to byte ``to`` of ``raw``.

    Args:
        cache: holds them.
        cells: int32, the block's.
        half_bytes: of a cell's K, and of its V.
        at, count, raw, to: see above.
    """
    half, inside = at // half_bytes, at % half_bytes
    end = to + count
    while to < end:
        size = min(half_bytes - inside, end - to)
        place = int(cells[half // 2]) * half_bytes + inside
        if half % 2 == 0:
            _copy_bytes(cache.keys, place, raw, to, size)
        else:
            _copy_bytes(cache.values, place, raw, to, size)
        half, inside = half + 1, 0
        to += size


@kernel
def _prefetch(cache: KVCache, cells: Int32Array, half_bytes: int, at: int, count: int) -> None:
    """Prefetch ``count`` bytes of a block, from byte ``at`` on; arguments as of ``_copy``."""
    half, inside = at // half_bytes, at % half_bytes
    while count > 0:
        size = min(half_bytes - inside, count)
        place = int(cells[half // 2]) * half_bytes + inside
        for line in range(place, place + size, LINE):
            if half % 2 == 0:
                _prefetch_line(cache.keys, line)
            else:
                _prefetch_line(cache.values, line)
        half, inside = half + 1, 0
        count -= size


@kernel
def _copy_halves(
    cache: KVCache, cells: Int32Array, half_bytes: int, at: int, count: int, raw: Float32Array,
    out: Float32Array, to: int,
) -> None:  # fmt: skip
    """Write ``count`` float16 of a block, from byte ``at`` on, to out[to:] in whole vectors."""
    _copy(cache, cells, half_bytes, at, count * _HALF, raw, 0)
    for i in range(0, count, LANES):
        store(out, to + i, _load_halves(raw, i * _HALF))


@kernel
def _fill(out: Float32Array, first: int, end: int, value: float) -> None:
    for i in range(first, end, LANES):
        store(out, i, splat(np.float32(value)))


@kernel
def _load_terms(
    cache: KVCache, cells: Int32Array, half_bytes: int, fields: Int32Array, tokens: int,
    first: int, count: int, dim: int, memory: QuantizedScratch,
) -> int:  # fmt: skip
    """Load the terms of a stream's channels and of ``count`` of its tokens, from ``first`` on.

    Returns:
        The byte of the block at which the stream's codes start.
    """
    at = int(fields[BYTES_AT])
    raw, channels, rank, groups = memory.raw, fields[CHANNELS], fields[RANK], fields[GROUPS]
    _fill(memory.channels, 0, dim, 1.0)
    _fill(memory.channels, dim, 2 * dim, 0.0)
    if channels & CHANNEL_SCALE:
        _copy_halves(cache, cells, half_bytes, at, dim, raw, memory.channels, 0)
        at += dim * _HALF
    if channels & CHANNEL_ZERO:
        _copy_halves(cache, cells, half_bytes, at, dim, raw, memory.channels, dim)
        at += dim * _HALF
    if rank > 0:
        _copy_halves(cache, cells, half_bytes, at, rank * dim, raw, memory.basis, 0)
        at += rank * dim * _HALF
    if groups > 0:
        width = 2 * groups
        start = at + first * width * _HALF
        _copy_halves(cache, cells, half_bytes, start, count * width, raw, memory.tokens, 0)
        at += tokens * width * _HALF
    if rank > 0:
        start = at + first * rank * _HALF
        _copy_halves(cache, cells, half_bytes, start, count * rank, raw, memory.coefficients, 0)
        at += tokens * rank * _HALF
    return at


@inlined_kernel
def _load_codes3(raw: Float32Array, number: int, plane: int) -> Any:
    high = _load_codes1(raw, plane + number // 8)
    return fma(high, splat(np.float32(4.0)), _load_codes2(raw, number // 4))


def _in_one_plane(width: int) -> Any:
    """Return a function like ``_load_codes3`` for codes of a width that divides a byte."""
    per_byte = 8 // width
    load_codes = {1: _load_codes1, 2: _load_codes2, 4: _load_codes4, 8: _load_codes8}[width]

    @inlined_kernel
    def load_numbered(raw: Float32Array, number: int, plane: int) -> Any:
        return load_codes(raw, number // per_byte)

    return load_numbered


def _decoder(width: int) -> Any:
    """Return a kernel that decodes codes of some bits."""
    codes = _load_codes3 if width == 3 else _in_one_plane(width)

    @inlined_kernel
    def decode_shape(
        groups: int, rank: int, count: int, dim: int, plane: int, memory: QuantizedScratch,
        out: KVArray, to: int,
    ) -> None:  # fmt: skip
        raw, parts = memory.raw, max(groups, 1)
        vectors = dim // parts // LANES
        one, nothing = splat(np.float32(1.0)), splat(np.float32(0.0))
        number = 0
        for token in range(count):
            d = 0
            for group in range(parts):
                term = 2 * (token * parts + group)
                scale = splat(memory.tokens[term]) if groups > 0 else one
                zero = splat(memory.tokens[term + 1]) if groups > 0 else nothing
                for _ in range(vectors):
                    x = fma(codes(raw, number, plane), scale, zero)
                    x = fma(x, load(memory.channels, d), load(memory.channels, dim + d))
                    for j in range(rank):
                        share = splat(memory.coefficients[token * rank + j])
                        x = fma(share, load(memory.basis, j * dim + d), x)
                    store_entry(out, to * dim + number, x)
                    number += LANES
                    d += LANES

    @kernel
    def decode(
        groups: int, rank: int, count: int, dim: int, plane: int, memory: QuantizedScratch,
        out: KVArray, to: int,
    ) -> None:  # fmt: skip
        # Loops whose lengths are constants are unrolled. Other shapes would take long to compile.
        if rank == 0 and dim == 64 and groups == 0:
            decode_shape(0, 0, count, 64, plane, memory, out, to)
        elif rank == 0 and dim == 64 and groups == 1:
            decode_shape(1, 0, count, 64, plane, memory, out, to)
        else:
            decode_shape(groups, rank, count, dim, plane, memory, out, to)

    return decode


_decode_codes = kernel_by_number({width: _decoder(width) for width in (4, 2, 3, 8, 1)})
"""Write ``count`` vectors, whose codes and terms are in ``memory``, to entries from ``to`` on.

Arguments: (bits, groups, rank, count, dim, plane, memory, out, to), where ``plane`` is the byte of
the codes' second plane.
"""


@kernel
def _place_outliers(
    cache: KVCache, cells: Int32Array, half_bytes: int, at: int, outliers: int, first: int,
    count: int, dim: int, memory: QuantizedScratch, out: KVArray, to: int,
) -> None:  # fmt: skip
    """Put outliers in their places, those of ``count`` tokens from ``first`` on.

    Args:
        at: byte of the block at which their places start.
        outliers: how many the block has.
        cache, cells, half_bytes, first, count, dim, memory, out, to: see ``_decode_stream``.
    """
    low, high = 0, outliers
    while low < high:  # the first one that is of these tokens
        middle = (low + high) // 2
        _copy(cache, cells, half_bytes, at + middle * _HALF, _HALF, memory.raw, 0)
        if _load_place(memory.raw, 0) < first * dim:
            low = middle + 1
        else:
            high = middle
    values_at = at + outliers * _HALF
    for start in range(low, outliers, _OUTLIERS_AT_ONCE):
        taken = min(_OUTLIERS_AT_ONCE, outliers - start)
        # Values come after the places in the scratch, which are half as wide.
        _copy_halves(
            cache, cells, half_bytes, values_at + start * _HALF, taken, memory.raw, memory.raw,
            _OUTLIERS_AT_ONCE,
        )  # fmt: skip
        _copy(cache, cells, half_bytes, at + start * _HALF, taken * _HALF, memory.raw, 0)
        for number in range(taken):
            place = _load_place(memory.raw, number * _HALF) - first * dim
            if place >= count * dim:
                return
            value = memory.raw[_OUTLIERS_AT_ONCE + number]
            replace_number(out, to * dim + place, value, memory.raw)


@inlined_kernel
def _replace_float(out: KVArray, at: int, value: float, scratch: Float32Array) -> None:
    out[at] = value


@inlined_kernel
def _replace_in_vector(out: KVArray, at: int, value: float, scratch: Float32Array) -> None:
    lane, room = at % LANES, 3 * _OUTLIERS_AT_ONCE
    store(scratch, room, load_entry(out, at - lane))
    scratch[room + lane] = value
    store_entry(out, at - lane, load(scratch, room))


@kernel_by_type
def replace_number(out: Any, *_: Any) -> Any:
    """Set a number of entries. Arguments: (out, at, value float32, scratch float32).

    One of a format that can't be rounded to alone is written anew with the vector that it is in.
    """
    return _replace_float if out.dtype == types.float32 else _replace_in_vector


@kernel
def _decode_stream(
    cache: KVCache, cells: Int32Array, fields: Int32Array, tokens: int, first: int, count: int,
    dim: int, memory: QuantizedScratch, out: KVArray, to: int,
) -> None:  # fmt: skip
    """Write the vectors of ``count`` tokens of a stream, from ``first`` on, to entries from ``to``.

    Args:
        cache: holds the block.
        cells: int32, the block's.
        fields: int32, of the stream.
        tokens: of the block.
        first, count: see above; at most PIECE.
        dim: elements of a vector.
        memory: of this thread.
        out: entries.
        to: number of the first entry.
    """
    half_bytes = dim * cache.keys.itemsize
    at = _load_terms(cache, cells, half_bytes, fields, tokens, first, count, dim, memory)
    bits, plane = int(fields[BITS]), 0
    width = 2 if bits == 3 else bits
    size, start = count * dim * width // 8, at + first * dim * width // 8
    _copy(cache, cells, half_bytes, start, size, memory.raw, 0)
    left = at + tokens * dim * width // 8 - (start + size)
    _prefetch(cache, cells, half_bytes, start + size, min(left, size))
    at += tokens * dim * width // 8
    if bits == 3:
        plane = size
        _copy(cache, cells, half_bytes, at + first * dim // 8, count * dim // 8, memory.raw, plane)
        at += tokens * dim // 8
    _decode_codes(bits, fields[GROUPS], fields[RANK], count, dim, plane, memory, out, to)
    if fields[OUTLIERS] > 0:
        _place_outliers(
            cache, cells, half_bytes, at, int(fields[OUTLIERS]), first, count, dim, memory, out, to
        )


@kernel
def decode_vectors(
    cache: KVCache, blocks: QuantizedTable, first_block: int, end_block: int, stream: int,
    start: int, count: int, dim: int, memory: QuantizedScratch, out: KVArray,
) -> None:  # fmt: skip
    """Write what ``count`` quantised keys or values of a head stand for to entries.

    Args:
        cache: holds the blocks.
        blocks: of the batch.
        first_block, end_block: the head's.
        stream: 0 for keys, 1 for values.
        start: number of the first one among the head's.
        count: at most PIECE.
        dim: elements of a vector.
        memory: of this thread.
        out: ``count`` entries, written from the first on.
    """
    before = 0
    for block in range(first_block, end_block):
        at = block * BLOCK_FIELDS
        tokens = int(blocks.table[at + TOKENS])
        first, end = max(start, before), min(start + count, before + tokens)
        if first < end:
            _decode_stream(
                cache, blocks.cells[blocks.table[at + CELLS_AT] :],
                blocks.table[at + STREAMS + stream * STREAM_FIELDS :], tokens, first - before,
                end - first, dim, memory, out, first - start,
            )  # fmt: skip
        before += tokens
