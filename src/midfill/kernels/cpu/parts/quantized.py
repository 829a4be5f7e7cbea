"""Quantised blocks (``kv.quantized``), decoded a few keys at a time to what kernels can read.

What a block holds is copied from its cells piece by piece (block_bytes.py). Then its
codes become numbers, and from there on quantised keys are like any others; or, where they have up
to 4 bits and few terms, codes of 4 bits, which are multiplied as they are (quantized_products.py)
and left where they lie if they follow one another there. Only as many are read at a time as fit the
first-level cache.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated
from midfill.kernels.cpu.jit import inlined_kernel, kernel, kernel_by_number
from midfill.kernels.cpu.kv_cache import KVArray, store_entry
from midfill.kernels.cpu.memory import Float32Array, Int32Array
from midfill.kernels.cpu.parts.block_bytes import (
    HALF,
    BlockBytes,
    byte_pointer,
    copy_bytes,
    copy_halves,
    find_run,
    prefetch_bytes,
)
from midfill.kernels.cpu.parts.outliers import add_to_entries
from midfill.kernels.cpu.segment_rows import SEGMENT
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
    load,
    load_unaligned,
    splat,
    store,
    store_unaligned,
)
from midfill.kernels.cpu.softmax import SoftmaxSums
from midfill.kv.quantized_layout import (
    BITS,
    BYTES_AT,
    CHANNEL_SCALE,
    CHANNEL_ZERO,
    CHANNELS,
    GROUPS,
    MAX_RANK,
    OUTLIERS,
    RANK,
)

PIECE = 64
"""Keys that are decoded at a time."""
BLOCK_ROWS = 64
"""Rows of a query block, times the query heads that share a unit: ``BLOCK`` of keys.py."""
MAX_GROUPS = 2
"""Groups of channels with terms of their own whose codes can be multiplied as they are."""
_WIDENED = 128
"""Codes that are widened at a time."""


class QuantizedScratch(NamedTuple):
    """A thread's memory for a segment of quantised keys.

    Attributes:
        entries: float32 [PIECE * head_dim], room for keys or values.
        raw: float32 [PIECE * head_dim + 32], bytes of a block as they are copied.
        channels: float32 [2 * head_dim], scales and zeros of channels.
        basis: float32 [MAX_RANK * head_dim].
        tokens: float32 [max(PIECE * head_dim / 8, 1024)], scales and zeros of tokens.
        coefficients: float32 [MAX_RANK * 256].
        terms: float32 [2 * 256], the scales and the zeros of a group of channels.
        queries: float32 [64 * head_dim], scaled for the channels of a block; later what sums of
            values are made of.
        row_terms: float32 [2 * 64], of the rows of ``queries``.
        panel: float32 [64 * 256], of a segment's keys: scores of a group of channels, or weights
            that were scaled for it.
        piece: softmax sums of a piece, 64 rows.
    """

    entries: Float32Array
    raw: Float32Array
    channels: Float32Array
    basis: Float32Array
    tokens: Float32Array
    coefficients: Float32Array
    terms: Float32Array
    queries: Float32Array
    row_terms: Float32Array
    panel: Float32Array
    piece: SoftmaxSums


def quantized_scratch_size(head_dim: int) -> int:
    """Return how many float32 a thread needs."""
    numbers, rows = PIECE * head_dim, BLOCK_ROWS * (head_dim + 2)
    ranks, tokens = MAX_RANK * (head_dim + SEGMENT), max(numbers // 8, 2 * MAX_GROUPS * SEGMENT)
    segment = (BLOCK_ROWS + 2) * SEGMENT
    return 2 * (numbers + LANES + head_dim + rows) + tokens + ranks + segment


quantized_words = kernel(quantized_scratch_size)
"""``quantized_scratch_size`` for kernels."""


@kernel
def cut_quantized(memory: Float32Array, head_dim: int) -> QuantizedScratch:
    """Cut a thread's memory into its parts."""
    numbers, rows = PIECE * head_dim, BLOCK_ROWS * head_dim
    entries, rest = memory[:numbers], memory[numbers:]
    raw, rest = rest[: numbers + 2 * LANES], rest[numbers + 2 * LANES :]
    channels, rest = rest[: 2 * head_dim], rest[2 * head_dim :]
    basis, rest = rest[: MAX_RANK * head_dim], rest[MAX_RANK * head_dim :]
    size = max(numbers // 8, 2 * MAX_GROUPS * SEGMENT)
    tokens, rest = rest[:size], rest[size:]
    coefficients, rest = rest[: SEGMENT * MAX_RANK], rest[SEGMENT * MAX_RANK :]
    terms, rest = rest[: 2 * SEGMENT], rest[2 * SEGMENT :]
    queries, rest = rest[:rows], rest[rows:]
    row_terms, rest = rest[: 2 * BLOCK_ROWS], rest[2 * BLOCK_ROWS :]
    panel, rest = rest[: BLOCK_ROWS * SEGMENT], rest[BLOCK_ROWS * SEGMENT :]
    piece = SoftmaxSums(rest[rows:], rest[:rows])
    return QuantizedScratch(
        entries, raw, channels, basis, tokens, coefficients, terms, queries, row_terms, panel,
        piece,
    )  # fmt: skip


# ---- generated code --------------------------------------------------------------------------


def _codes_of(width: int) -> Any:
    """Return a function that loads 16 codes of 1, 2, 4 or 8 bits as float32."""

    def load_codes(context: Any, builder: Any, kinds: Any, array: Any, at: Any) -> Any:
        pointer = byte_pointer(context, builder, kinds[0], array, at)
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
        bytes_ = 2 * width  # of 16 codes: byte i has codes i, i + bytes_ and so on
        shifts = [8 * (lane % bytes_) + width * (lane // bytes_) for lane in range(LANES)]
        shifted = builder.lshr(spread, ir.Constant(I32_VECTOR, shifts))
        mask = ir.Constant(I32_VECTOR, [(1 << width) - 1] * LANES)
        return builder.sitofp(builder.and_(shifted, mask), F32_VECTOR)

    return generated(f32x16, OWN, INDEX)(load_codes)


_load_codes1, _load_codes2, _load_codes4, _load_codes8 = map(_codes_of, (1, 2, 4, 8))


_PAIR_WORDS = ir.VectorType(I32, LANES // 2)


def _word_constant(value: int) -> ir.Constant:
    return ir.Constant(_PAIR_WORDS, [value] * (LANES // 2))


def _widen_bits(builder: ir.IRBuilder, pointer: Any) -> Any:
    """Load 128 codes of 1 bit as codes of 2 bits."""
    bits = load_unaligned(builder, pointer, ir.VectorType(I16, LANES // 2))
    bits = builder.zext(bits, _PAIR_WORDS)
    low = builder.and_(bits, _word_constant(0x5555))
    high = builder.and_(bits, _word_constant(0xAAAA))
    return builder.or_(low, builder.shl(high, _word_constant(15)))


def _widen_pairs(builder: ir.IRBuilder, pairs: Any) -> Any:
    """Return 128 codes of 2 bits as codes of 4 bits."""
    mask = _word_constant(0x33333333)
    low = builder.and_(pairs, mask)
    high = builder.and_(builder.lshr(pairs, _word_constant(2)), mask)
    order = [place for i in range(LANES // 2) for place in (i, LANES // 2 + i)]
    return builder.shuffle_vector(low, high, ir.Constant(I32_VECTOR, order))


def _nibbles_of(bits: int) -> Any:
    """Return a function that copies 128 codes of 1, 2 or 3 bits as codes of 4 bits, see below.

    Its arguments: (array, byte of the codes, byte of their second plane, other array, byte there).
    """

    def copy_nibbles(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
        array, at, plane, other, to = arguments
        pointer = byte_pointer(context, builder, kinds[0], array, at)
        if bits == 1:
            codes = _widen_pairs(builder, _widen_bits(builder, pointer))
        else:
            codes = _widen_pairs(builder, load_unaligned(builder, pointer, _PAIR_WORDS))
        if bits == 3:
            pointer = byte_pointer(context, builder, kinds[0], array, plane)
            high = _widen_pairs(builder, _widen_bits(builder, pointer))
            shift = ir.Constant(I32_VECTOR, [2] * LANES)
            codes = builder.or_(codes, builder.shl(high, shift))
        centre = 8 - (1 << (bits - 1))
        codes = builder.add(codes, ir.Constant(I32_VECTOR, [centre * 0x11111111] * LANES))
        target = byte_pointer(context, builder, kinds[3], other, to)
        store_unaligned(builder, codes, target)

    return generated(types.void, OWN, INDEX, INDEX, OWN, INDEX)(copy_nibbles)


_copy_nibbles1, _copy_nibbles2, _copy_nibbles3 = map(_nibbles_of, (1, 2, 3))


def _viewed(source: Any, result: Any, itemsize: int) -> Any:
    """Return the code of a view of an array as one of another type, of as many bytes."""

    source_size = source.dtype.bitwidth // 8

    def view(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(source)(context, builder, arguments[0])
        found = context.make_array(result)(context, builder)
        [length] = cgutils.unpack_tuple(builder, array.shape)
        size, before = (ir.Constant(length.type, each) for each in (itemsize, source_size))
        populate_array(
            found,
            data=builder.bitcast(array.data, found.data.type),
            shape=[builder.sdiv(builder.mul(length, before), size)],
            strides=[size],
            itemsize=size,
            meminfo=None,
        )
        return found._getvalue()

    return view


def _entries_in(typing_context: Any, scratch: Any, entries: Any) -> Any:
    """Return scratch as what queries that were prepared for ``entries`` can be multiplied with.

    Those for bfloat16 are rounded to pairs and need the like; all others take float32.
    """
    if entries.dtype != types.int16:
        return scratch(scratch, entries), lambda _, __, ___, arguments: arguments[0]
    return entries(scratch, entries), _viewed(scratch, entries, 2)


def _bytes_in(typing_context: Any, array: Any) -> Any:
    """Return an array as one of uint8, which is what entries of 4 bits are."""
    result = types.Array(types.uint8, 1, "C")
    return result(array), _viewed(array, result, 1)


entries_in = intrinsic(_entries_in)
bytes_in = intrinsic(_bytes_in)

# ---- decoding --------------------------------------------------------------------------------


@inlined_kernel
def _fill(out: Float32Array, first: int, end: int, value: float) -> None:
    for i in range(first, end, LANES):
        store(out, i, splat(np.float32(value)))


@kernel
def _load_low_rank(
    source: BlockBytes, rank: int, basis_at: int, coefficients_at: int, tokens: int, first: int,
    count: int, dim: int, memory: QuantizedScratch,
) -> None:  # fmt: skip
    """Load the basis, and the coefficients of ``count`` of a block's tokens from ``first`` on.

    Both are in the block, from a byte on each.
    """
    copy_halves(source, basis_at, rank * dim, memory.raw, memory.basis, 0)
    for j in range(rank):
        at, to = coefficients_at + (j * tokens + first) * HALF, j * SEGMENT
        copy_halves(source, at, count, memory.raw, memory.coefficients, to)
        for token in range(count, (count + LANES - 1) // LANES * LANES):
            memory.coefficients[to + token] = np.float32(0.0)


@inlined_kernel
def _load_terms(
    source: BlockBytes, fields: Int32Array, tokens: int,
    first: int, count: int, dim: int, memory: QuantizedScratch,
) -> int:  # fmt: skip
    """Load the terms of a stream's channels and of ``count`` of its tokens, from ``first`` on.

    Returns:
        The byte of the block at which the stream's codes start.
    """
    at = int(fields[BYTES_AT])
    raw, channels, rank, groups = memory.raw, fields[CHANNELS], fields[RANK], fields[GROUPS]
    has_both = channels & CHANNEL_SCALE and channels & CHANNEL_ZERO
    if not has_both:
        _fill(memory.channels, 0, dim, 1.0)
        _fill(memory.channels, dim, 2 * dim, 0.0)
    if channels:  # zeros follow scales, here and there
        to = 0 if channels & CHANNEL_SCALE else dim
        length = 2 * dim if has_both else dim
        copy_halves(source, at, length, raw, memory.channels, to)
        at += length * HALF
    basis_at = at
    at += int(rank) * dim * HALF
    if groups > 0:
        width = 2 * groups
        start = at + first * width * HALF
        copy_halves(source, start, count * width, raw, memory.tokens, 0)
        at += tokens * width * HALF
    if rank > 0:
        _load_low_rank(source, int(rank), basis_at, at, tokens, first, count, dim, memory)
        at += tokens * int(rank) * HALF
    return at


@inlined_kernel
def codes_at(fields: Int32Array, tokens: int, dim: int) -> int:
    """Return the byte of a block at which a stream's codes start."""
    vectors = (fields[CHANNELS] & CHANNEL_SCALE) + (fields[CHANNELS] & CHANNEL_ZERO) // 2
    terms = (vectors + fields[RANK]) * dim + (2 * fields[GROUPS] + fields[RANK]) * tokens
    return int(fields[BYTES_AT] + terms * HALF)


@inlined_kernel
def outliers_at(fields: Int32Array, tokens: int, dim: int) -> int:
    """Return the byte of a block at which a stream's outliers start."""
    return int(codes_at(fields, tokens, dim) + tokens * dim * int(fields[BITS]) // 8)


@kernel
def prefetch_codes(
    source: BlockBytes, fields: Int32Array, tokens: int, first: int, count: int,
    dim: int,
) -> None:  # fmt: skip
    """Prefetch the codes of ``count`` tokens of a stream; arguments as of ``load_codes``."""
    width = 2 if fields[BITS] == 3 else int(fields[BITS])
    start = codes_at(fields, tokens, dim) + first * dim * width // 8
    prefetch_bytes(source, start, count * dim * width // 8)


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

    @kernel
    def decode(
        groups: int, rank: int, count: int, dim: int, plane: int, memory: QuantizedScratch,
        out: KVArray,
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
                        share = splat(memory.coefficients[j * SEGMENT + token])
                        x = fma(share, load(memory.basis, j * dim + d), x)
                    store_entry(out, number, x)
                    number += LANES
                    d += LANES

    return decode


_decode_codes = kernel_by_number({width: _decoder(width) for width in (4, 2, 3, 8, 1)})
"""Write ``count`` vectors, whose codes and terms are in ``memory``, to the first entries.

Arguments: (bits, groups, rank, count, dim, plane, memory, out), where ``plane`` is the byte of the
codes' second plane.
"""


@inlined_kernel
def load_codes(
    source: BlockBytes, fields: Int32Array, tokens: int, first: int, count: int,
    dim: int, memory: QuantizedScratch, out: Float32Array,
) -> None:  # fmt: skip
    """Copy the codes of ``count`` tokens of a stream, from ``first`` on, and their terms.

    Args:
        source: the block.
        fields: int32, of the stream.
        tokens: of the block.
        first, count: see above; at most PIECE, or 256 where codes have 4 bits or fewer.
        dim: elements of a vector.
        memory: of this thread.
        out: where the codes go, ``raw`` or ``entries`` of ``memory``.

    Codes of 3 bits have their second plane at byte count * dim / 4 of ``out``.
    """
    at = _load_terms(source, fields, tokens, first, count, dim, memory)
    bits = int(fields[BITS])
    width = 2 if bits == 3 else bits
    size, start = count * dim * width // 8, at + first * dim * width // 8
    copy_bytes(source, start, size, out, 0)
    if bits == 3:
        start = at + tokens * dim * width // 8 + first * dim // 8
        copy_bytes(source, start, count * dim // 8, out, size)


@kernel
def decode_stream(
    source: BlockBytes, fields: Int32Array, tokens: int, first: int, count: int,
    dim: int, memory: QuantizedScratch, out: KVArray,
) -> None:  # fmt: skip
    """Write the vectors of ``count`` tokens of a stream, from ``first`` on, to the first entries.

    Args:
        source, fields, tokens, first, count, dim, memory: see ``load_codes``.
        out: entries.
    """
    load_codes(source, fields, tokens, first, count, dim, memory, memory.raw)
    plane = count * dim // 4
    _decode_codes(
        int(fields[BITS]), fields[GROUPS], fields[RANK], count, dim, plane, memory, out
    )  # fmt: skip
    if fields[OUTLIERS] > 0:
        at, stored = outliers_at(fields, tokens, dim), int(fields[OUTLIERS])
        add_to_entries(source, at, stored, first, count, dim, memory.raw, out)


class Nibbles(NamedTuple):
    """Codes of 4 bits, as a KV cache of 4 bits has them.

    Attributes:
        entries: uint8.
        base: at which number of ``entries``, two per byte, those of the first token are.
    """

    entries: KVArray
    base: int


@inlined_kernel
def find_nibbles(
    source: BlockBytes, fields: Int32Array, tokens: int, first: int, count: int, dim: int
) -> tuple[bool, Nibbles]:
    """Find codes of 4 bits that lie side by side; arguments as of ``load_codes``.

    Returns:
        Whether they have 4 bits and do, and where.
    """
    start, size = codes_at(fields, tokens, dim) + first * dim // 2, count * dim // 2
    in_values, place, found = find_run(source, start, size)
    is_found = fields[BITS] == 4 and found == size
    if in_values:
        return is_found, Nibbles(bytes_in(source.cache.values), 2 * place)
    return is_found, Nibbles(bytes_in(source.cache.keys), 2 * place)


@inlined_kernel
def load_nibbles(
    source: BlockBytes, fields: Int32Array, tokens: int, first: int, count: int, dim: int,
    memory: QuantizedScratch,
) -> Nibbles:  # fmt: skip
    """Return codes of up to 4 bits as codes of 4, and load their terms.

    Those of 4 bits are left where they are, if they follow one another there; all others are
    copied to ``memory.entries``. The middle of what b bits hold, 2^(b - 1), becomes 8, which stands
    for 0 in a KV cache of 4 bits. So products are of small numbers, and what rounds the other
    factor is as small.

    Arguments as of ``load_codes``.
    """
    bits, numbers, copied = int(fields[BITS]), count * dim, bytes_in(memory.entries)
    if bits == 4:
        at = _load_terms(source, fields, tokens, first, count, dim, memory)
        is_found, found = find_nibbles(source, fields, tokens, first, count, dim)
        if is_found:
            return found
        copy_bytes(source, at + first * dim // 2, numbers // 2, memory.entries, 0)
        return Nibbles(copied, 0)
    load_codes(source, fields, tokens, first, count, dim, memory, memory.raw)
    # The last of 128 codes may lie behind the last vector, and in memory that isn't used.
    for i in range(0, numbers, _WIDENED):
        if bits == 1:
            _copy_nibbles1(memory.raw, i // 8, 0, memory.entries, i // 2)
        elif bits == 2:
            _copy_nibbles2(memory.raw, i // 4, 0, memory.entries, i // 2)
        else:
            plane = numbers // 4 + i // 8
            _copy_nibbles3(memory.raw, i // 4, plane, memory.entries, i // 2)
    return Nibbles(copied, 0)
