"""KV cache: K and V of all slots, in the precision the cache is kept in.

An entry is the K or V vector of one token and one KV head. The entries of a layer and head lie in
slot order, so the KV of consecutive slots is one stream of memory: an array of entries is
[layers, kv_heads, slots, head_dim], flat. NumPy's dtype of it tells which:

    float32   as computed
    uint16    float16, rounded to nearest; what is too large is stored as +-65504
    int16     bfloat16, rounded to nearest; attention multiplies it as it is (pair_segments.py)
    int8      quants -127..127, times the entry's own scale, float32 [layers, kv_heads, slots]
    uint8     quants -8..7, stored as 0..15, two per byte, times the entry's own scale; they stand
              for the entry's Hadamard transform (hadamard.py). Byte i of 8 has lane i of 16 in its
              low half, lane i + 8 in its high one. Attention multiplies them as integers
              (int4_segments.py)

An entry is rounded once, when it is written. Every reader sees the rounded values, also those of
the same step, so answers do not depend on how a prompt was cut into chunks.
"""

import mmap
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from midfill.kernels.cpu.bfloat16 import load_bfloat16s, store_bfloat16s
from midfill.kernels.cpu.hadamard import hadamard
from midfill.kernels.cpu.halves import load_halves, store_halves
from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated
from midfill.kernels.cpu.jit import entry_point, inlined_kernel, kernel, kernel_by_type
from midfill.kernels.cpu.memory import Float32Array, Int32Array, Int64Array, small_page_zeros
from midfill.kernels.cpu.simd import (
    F32_VECTOR,
    I8,
    I32,
    I32_VECTOR,
    I64,
    LANES,
    absolute,
    address,
    constant,
    f32x16,
    integer,
    integers,
    llvm_call,
    load,
    load_unaligned,
    max_lanes,
    maximum,
    multiply,
    splat,
    store,
    store_unaligned,
    subtract,
)

I8_VECTOR = ir.VectorType(I8, LANES)
_PACKED_VECTOR = ir.VectorType(I8, LANES // 2)
_LOW_LANES = ir.Constant(ir.VectorType(I32, LANES // 2), list(range(LANES // 2)))
_HIGH_LANES = ir.Constant(ir.VectorType(I32, LANES // 2), list(range(LANES // 2, LANES)))
_ALL_LANES = ir.Constant(I32_VECTOR, list(range(LANES)))
_STEPS = np.float32(127.0)
_PACKED_STEPS = np.float32(-8.0)
PACKED_ZERO = 8
"""What a packed quant of 0 is stored as."""


KVArray = npt.NDArray[np.generic]
"""Entries of any dtype: float32, uint16, int16, int8 or uint8."""


class KVCacheDtype(StrEnum):
    """How a KV cache stores its numbers. ``config.KVCacheDtypeName`` is what one may ask for."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I8 = "i8"
    I4 = "i4"


_DTYPES: dict[KVCacheDtype, Any] = {
    KVCacheDtype.F32: np.float32,
    KVCacheDtype.F16: np.uint16,
    KVCacheDtype.BF16: np.int16,
    KVCacheDtype.I8: np.int8,
    KVCacheDtype.I4: np.uint8,
}
_WITH_SCALES = (KVCacheDtype.I8, KVCacheDtype.I4)


class KVCache(NamedTuple):
    """K and V of all slots.

    Attributes:
        keys, values: [layers * kv_heads * slots * head_dim], float32, uint16, int16 or int8, or
            half as many of uint8; keys are stored after the rotary embedding.
        key_scales, value_scales: float32 [layers * kv_heads * slots]; empty unless there are
            quants.
    """

    keys: KVArray
    values: KVArray
    key_scales: Float32Array
    value_scales: Float32Array

    @classmethod
    def allocate(cls, kv_cache_dtype: KVCacheDtype, entries: int, head_dim: int) -> "KVCache":
        """Return a cache of zeros for ``entries`` entries of K and as many of V."""
        keys, key_scales = allocate_kv(kv_cache_dtype, entries, head_dim)
        values, value_scales = allocate_kv(kv_cache_dtype, entries, head_dim)
        return cls(keys, values, key_scales, value_scales)

    def count_entries(self, head_dim: int) -> int:
        """Return how many entries of K there are."""
        numbers = len(self.keys) * (2 if self.keys.dtype == np.uint8 else 1)
        return numbers // head_dim


class LayerKV(NamedTuple):
    """One layer's part of the KV cache.

    Attributes:
        cache: all layers.
        slots: slots of the cache.
        first_entry: number of the entry of the layer's first head and slot.
    """

    cache: KVCache
    slots: int
    first_entry: int


def entry_bytes(kv_cache_dtype: KVCacheDtype, head_dim: int) -> int:
    """Return the bytes of one entry, its scale included."""
    scale = 4 if kv_cache_dtype in _WITH_SCALES else 0
    items = head_dim // numbers_per_item(kv_cache_dtype)
    return items * np.dtype(_DTYPES[kv_cache_dtype]).itemsize + scale


def numbers_per_item(kv_cache_dtype: KVCacheDtype) -> int:
    """Return how many numbers an item of an array of entries holds."""
    return 2 if kv_cache_dtype is KVCacheDtype.I4 else 1


def allocate_kv(
    kv_cache_dtype: KVCacheDtype, entries: int, head_dim: int
) -> tuple[KVArray, Float32Array]:
    """Return zeros: entries [entries * head_dim] and scales [entries], or [0] without scales.

    Of entries that are packed two numbers to an item, there are half as many items.
    """
    scales = entries if kv_cache_dtype in _WITH_SCALES else 0
    items = entries * head_dim // numbers_per_item(kv_cache_dtype)
    values = small_page_zeros(items, _DTYPES[kv_cache_dtype])
    return values, small_page_zeros(scales, np.float32).view(np.float32)


def is_packed(array_type: Any) -> bool:
    """Return whether items of an array of this Numba type hold two numbers each."""
    return bool(array_type.dtype == types.uint8)


def numbers_in_item(array_type: Any) -> int:
    """Return how many numbers an item of an array of this Numba type holds."""
    return 2 if is_packed(array_type) else 1


def item_offset(builder: ir.IRBuilder, array_type: Any, offset: Any) -> Any:
    """Generate the number of the item that holds number ``offset``; a multiple of 16."""
    return builder.ashr(offset, integer(1)) if is_packed(array_type) else offset


def entry_size(array_type: Any, head_dim: int) -> int:
    """Return the bytes of an entry in an array of this Numba type, without its scale."""
    bits: int = array_type.dtype.bitwidth // numbers_in_item(array_type)
    return head_dim * bits // 8


def load_entry_vector(context: Any, builder: ir.IRBuilder, array_type: Any, pointer: Any) -> Any:
    """Generate a load of 16 numbers of an entry as float32; of quants, without their scale."""
    if array_type.dtype == types.float32:
        return load_unaligned(builder, pointer, F32_VECTOR)
    if array_type.dtype == types.uint16:
        return load_halves(context, builder, pointer)
    if array_type.dtype == types.int16:
        return load_bfloat16s(builder, pointer)
    if is_packed(array_type):
        return _load_packed(builder, pointer)
    quants = builder.sext(load_unaligned(builder, pointer, I8_VECTOR), I32_VECTOR)
    return builder.sitofp(quants, F32_VECTOR)


def _load_packed(builder: ir.IRBuilder, pointer: Any) -> Any:
    """Generate a load of 16 numbers that are packed two to a byte."""
    wide = ir.VectorType(I32, LANES // 2)
    packed = builder.zext(load_unaligned(builder, pointer, _PACKED_VECTOR), wide)
    low = builder.and_(packed, ir.Constant(wide, [15] * (LANES // 2)))
    high = builder.lshr(packed, ir.Constant(wide, [4] * (LANES // 2)))
    quants = builder.shuffle_vector(low, high, _ALL_LANES)
    return builder.sitofp(builder.sub(quants, integers(PACKED_ZERO)), F32_VECTOR)


def _store_packed(builder: ir.IRBuilder, value: Any, pointer: Any) -> None:
    """Generate a store of 16 numbers, rounded to -8..7 and packed two to a byte."""
    whole = llvm_call(builder, "llvm.rint.v16f32", [value], F32_VECTOR)
    whole = llvm_call(builder, "llvm.minnum.v16f32", [whole, constant(7.0)], F32_VECTOR)
    whole = llvm_call(builder, "llvm.maxnum.v16f32", [whole, constant(-8.0)], F32_VECTOR)
    quants = builder.add(builder.fptosi(whole, I32_VECTOR), integers(PACKED_ZERO))
    low = builder.shuffle_vector(quants, quants, _LOW_LANES)
    high = builder.shuffle_vector(quants, quants, _HIGH_LANES)
    high = builder.shl(high, ir.Constant(high.type, [4] * (LANES // 2)))
    store_unaligned(builder, builder.trunc(builder.or_(low, high), _PACKED_VECTOR), pointer)


@generated(types.boolean, OWN)
def is_quantized(context: Any, builder: Any, kinds: Any, entries: Any) -> Any:
    """Return whether entries are quants with a scale; known when the kernel is compiled."""
    return context.get_constant(types.boolean, is_packed(kinds[0]) or kinds[0].dtype == types.int8)


@generated(types.intp, OWN)
def _numbers_per_item(context: Any, builder: Any, kinds: Any, entries: Any) -> Any:
    return context.get_constant(types.intp, numbers_in_item(kinds[0]))


@inlined_kernel
def entry_count(entries: KVArray, head_dim: int) -> int:
    """Return how many entries of ``head_dim`` numbers an array holds."""
    return len(entries) * _numbers_per_item(entries) // head_dim


@inlined_kernel
def _transform_nothing(entries: KVArray, x: Float32Array, at: int, head_dim: int) -> None:
    """Leave the numbers as they are."""


@inlined_kernel
def _transform(entries: KVArray, x: Float32Array, at: int, head_dim: int) -> None:
    hadamard(x, at, head_dim)


@kernel_by_type
def transform_for(entries: Any, *_: Any) -> Any:
    """Turn x[at:at + head_dim] into what entries stand for, or back; in place.

    Arguments: (entries, x float32, at, head_dim).
    """
    return _transform if is_packed(entries) else _transform_nothing


@generated(f32x16, OWN, INDEX)
def load_entry(context: Any, builder: Any, kinds: Any, entries: Any, offset: Any) -> Any:
    """Load lanes 0..15 from entries[offset:offset + 16], as float32."""
    at = item_offset(builder, kinds[0], offset)
    pointer = address(context, builder, kinds[0], entries, at)
    return load_entry_vector(context, builder, kinds[0], pointer)


@generated(types.void, OWN, INDEX, f32x16)
def store_entry(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
    """Store entries[offset:offset + 16] = value, rounded to the nearest that the format holds."""
    entries, offset, value = arguments
    kind = kinds[0]
    pointer = address(context, builder, kind, entries, item_offset(builder, kind, offset))
    if kind.dtype == types.float32:
        store_unaligned(builder, value, pointer)
    elif kind.dtype == types.uint16:
        store_halves(context, builder, value, pointer)
    elif kind.dtype == types.int16:
        store_bfloat16s(builder, value, pointer)
    elif is_packed(kind):
        _store_packed(builder, value, pointer)
    else:
        whole = llvm_call(builder, "llvm.rint.v16f32", [value], F32_VECTOR)
        quants = builder.trunc(builder.fptosi(whole, I32_VECTOR), I8_VECTOR)
        store_unaligned(builder, quants, pointer)


@generated(types.void, OWN, INDEX, INDEX)
def touch_page(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
    """If entries[offset:offset + size] is the first entry of a page of memory, write to the page.

    What is there stays as it is.
    """
    entries, offset, size = arguments
    kind = kinds[0]
    pointer = address(context, builder, kind, entries, item_offset(builder, kind, offset))
    sixteen = builder.sdiv(size, integer(LANES))
    entry_bytes = builder.mul(sixteen, integer(entry_size(kind, LANES)))
    place = builder.and_(builder.ptrtoint(pointer, I64), integer(mmap.PAGESIZE - 1))
    with builder.if_then(builder.icmp_unsigned("<", place, entry_bytes), likely=False):
        word = builder.bitcast(pointer, I32.as_pointer())
        # 0 for 0, which isn't optimised away. Reading first would ask for the page twice.
        builder.cmpxchg(word, I32(0), I32(0), "monotonic", "monotonic")


@inlined_kernel
def _symmetric_range(entries: KVArray, x: Float32Array, at: int, head_dim: int) -> Any:
    largest = splat(np.float32(0.0))
    for d in range(0, head_dim, LANES):
        largest = maximum(largest, absolute(load(x, at + d)))
    return max_lanes(largest), _STEPS


@inlined_kernel
def _signed_range(entries: KVArray, x: Float32Array, at: int, head_dim: int) -> Any:
    above, below = splat(np.float32(0.0)), splat(np.float32(0.0))
    for d in range(0, head_dim, LANES):
        above = maximum(above, load(x, at + d))
        below = maximum(below, subtract(splat(np.float32(0.0)), load(x, at + d)))
    highest, lowest = max_lanes(above), -max_lanes(below)
    return highest if highest > -lowest else lowest, _PACKED_STEPS


@kernel_by_type
def find_range(entries: Any, *_: Any) -> Any:
    """Return the largest of x[at:at + head_dim], and the quant that will stand for it.

    Of -8..7 that is -8, for the number with the largest magnitude, so the scale may be negative.
    Arguments: (entries, x, at, head_dim).
    """
    return _signed_range if is_packed(entries) else _symmetric_range


@kernel
def write_entry(
    x: Float32Array, x_at: int, head_dim: int, entries: KVArray, scales: Float32Array, entry: int
) -> None:
    """Round x[x_at:x_at + head_dim] to entry number ``entry``; where it is transformed, so is x."""
    at = entry * head_dim
    if not is_quantized(entries):
        for d in range(0, head_dim, LANES):
            store_entry(entries, at + d, load(x, x_at + d))
        return
    transform_for(entries, x, x_at, head_dim)
    largest, steps = find_range(entries, x, x_at, head_dim)
    scales[entry] = largest / steps
    factor = splat(steps / largest if largest != np.float32(0.0) else np.float32(0.0))
    for d in range(0, head_dim, LANES):
        store_entry(entries, at + d, multiply(load(x, x_at + d), factor))


@entry_point
def read_cells(
    thread: int, threads: int, sync: Int64Array,
    cells: Int32Array, head_dim: int, entries: KVArray, scales: Float32Array, out: Float32Array,
) -> None:  # fmt: skip
    """Write what the numbers of some cells stand for to ``out``; run by all threads of a pool.

    Args:
        thread, threads, sync: see ``thread_pool``.
        cells: int32 [n], numbers of entries.
        head_dim: elements of an entry.
        entries, scales: of the KV cache.
        out: float32 [n * head_dim].
    """
    for number in range(len(cells) * thread // threads, len(cells) * (thread + 1) // threads):
        at, cell = number * head_dim, int(cells[number])
        factor = splat(scales[cell] if is_quantized(entries) else np.float32(1.0))
        for d in range(0, head_dim, LANES):
            store(out, at + d, multiply(load_entry(entries, cell * head_dim + d), factor))
        transform_for(entries, out, at, head_dim)


@entry_point
def write_cells(
    thread: int, threads: int, sync: Int64Array,
    cells: Int32Array, head_dim: int, numbers: Float32Array, entries: KVArray, scales: Float32Array,
) -> None:  # fmt: skip
    """Round ``numbers`` [n * head_dim] to some cells; the other arguments as in ``read_cells``.

    Where entries are transformed, so are the numbers.
    """
    for number in range(len(cells) * thread // threads, len(cells) * (thread + 1) // threads):
        write_entry(numbers, number * head_dim, head_dim, entries, scales, int(cells[number]))


@entry_point
def rotate_cells(
    thread: int, threads: int, sync: Int64Array,
    cells: Int32Array, turns: Int32Array, cos: Float32Array, sin: Float32Array, head_dim: int,
    keys: KVArray, scales: Float32Array, rotated: KVArray, rotated_scales: Float32Array,
    scratch: Float32Array,
) -> None:  # fmt: skip
    """Write the keys of some cells, rotated, to ``rotated``; run by all threads of a pool.

    Args:
        thread, threads, sync: see ``thread_pool``.
        cells: int32 [n], numbers of entries in ``keys``.
        turns: int32 [n], by which row of ``cos`` and ``sin`` each key turns.
        cos, sin: float32 [angles * head_dim / 2].
        head_dim: elements of a key.
        keys, scales: of the KV cache.
        rotated, rotated_scales: the same for n entries; what is written.
        scratch: float32 [threads * head_dim].
    """
    half, at = head_dim // 2, thread * head_dim
    for entry in range(len(cells) * thread // threads, len(cells) * (thread + 1) // threads):
        cell, angles = int(cells[entry]), int(turns[entry]) * half
        factor = splat(scales[cell] if is_quantized(keys) else np.float32(1.0))
        for d in range(0, head_dim, LANES):
            store(scratch, at + d, multiply(load_entry(keys, cell * head_dim + d), factor))
        transform_for(keys, scratch, at, head_dim)
        for d in range(half):
            first, second = scratch[at + d], scratch[at + half + d]
            c, s = cos[angles + d], sin[angles + d]
            scratch[at + d] = first * c - second * s
            scratch[at + half + d] = second * c + first * s
        write_entry(scratch, at, head_dim, rotated, rotated_scales, entry)
