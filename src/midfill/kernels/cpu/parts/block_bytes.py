"""The bytes of a quantised block (``kv.quantized``): found in its cells, copied and prefetched.

Cells may lie anywhere, so a block's bytes are runs. They are read in arrays of any type.
"""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from midfill.kernels.cpu.halves import load_halves
from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated
from midfill.kernels.cpu.jit import inlined_kernel, kernel
from midfill.kernels.cpu.kv_cache import KVArray, KVCache
from midfill.kernels.cpu.memory import LINE, Float32Array, Int32Array
from midfill.kernels.cpu.simd import (
    I8,
    I32,
    I32_VECTOR,
    LANES,
    f32x16,
    llvm_call,
    load_unaligned,
    store,
    store_unaligned,
)

HALF = 2
"""Bytes of a float16."""
_MAX_CHECKED_CELLS = 128


def byte_pointer(context: Any, builder: ir.IRBuilder, kind: Any, array: Any, at: Any) -> Any:
    """Return a pointer to byte ``at`` of an array of any type."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.gep(builder.bitcast(data, I8.as_pointer()), [at])


@generated(types.void, OWN, INDEX, OWN, INDEX, INDEX)
def _copy_bytes(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
    """Copy ``count`` bytes from byte ``at`` of an array to byte ``to`` of another.

    Arguments: (array, at, other, to, count).
    """
    array, at, other, to, count = arguments
    source = byte_pointer(context, builder, kinds[0], array, at)
    target = byte_pointer(context, builder, kinds[2], other, to)
    cgutils.raw_memcpy(builder, target, source, count, 1)


@generated(types.void, OWN, INDEX, OWN, INDEX)
def _copy_line(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
    """Copy 64 bytes from byte ``at`` of an array to byte ``to`` of another.

    Arguments: (array, at, other, to).
    """
    array, at, other, to = arguments
    source = byte_pointer(context, builder, kinds[0], array, at)
    line = load_unaligned(builder, source, I32_VECTOR)
    store_unaligned(builder, line, byte_pointer(context, builder, kinds[2], other, to))


@generated(types.void, OWN, INDEX)
def _prefetch_line(context: Any, builder: Any, kinds: Any, array: Any, at: Any) -> None:
    """Prefetch the line of byte ``at`` of an array into the second-level cache."""
    pointer = byte_pointer(context, builder, kinds[0], array, at)
    hints = [I32(hint) for hint in (0, 2, 1)]  # read, second level, data
    llvm_call(builder, "llvm.prefetch.p0", [pointer, *hints], ir.VoidType())


@generated(f32x16, OWN, INDEX)
def _load_halves(context: Any, builder: Any, kinds: Any, array: Any, at: Any) -> Any:
    """Load 16 float16 from byte ``at`` of an array, as float32."""
    return load_halves(context, builder, byte_pointer(context, builder, kinds[0], array, at))


class BlockBytes(NamedTuple):
    """Where the bytes of a block are.

    Attributes:
        cache: holds them.
        cells: int32, the block's, and what comes after them.
        filled: how many cells it fills.
        half_bytes: of a cell's K, and of its V.
        is_run: whether its cells are known to follow one another.
    """

    cache: KVCache
    cells: Int32Array
    filled: int
    half_bytes: int
    is_run: bool


@inlined_kernel
def are_consecutive(cells: Int32Array, filled: int) -> bool:
    """Return whether the first ``filled`` cells are known to follow one another.

    Looked at where there are few, as in a block of 64 tokens: then finding them takes as long as
    what is done with them.
    """
    if filled > _MAX_CHECKED_CELLS:
        return False
    matching = 0
    for cell in range(filled):
        matching += int(cells[cell] - cells[0] == cell)
    return matching == filled


@inlined_kernel
def find_run(source: BlockBytes, at: int, count: int) -> tuple[bool, int, int]:
    """Find a byte of a block, and what lies beside it.

    Returns:
        Whether it lies among values of the cache; at which byte of these, or of the keys; and how
        many of the block's ``count`` bytes from there on follow one another.
    """
    if not source.is_run:
        return _find_scattered(source, at, count)
    limit = source.filled * source.half_bytes
    in_values = at >= limit
    inside = at - limit if in_values else at
    size = min(limit - inside, count)
    return in_values, int(source.cells[0]) * source.half_bytes + inside, size


@kernel
def _find_scattered(source: BlockBytes, at: int, count: int) -> tuple[bool, int, int]:
    """Do the same where cells may lie anywhere."""
    half, limit = source.half_bytes, source.filled * source.half_bytes
    in_values = at >= limit
    inside = at - limit if in_values else at
    cell, offset = inside // half, inside % half
    number, size = int(source.cells[cell]), half - offset
    place = number * half + offset
    while size < count and cell + 1 < source.filled and source.cells[cell + 1] == number + 1:
        cell, number, size = cell + 1, number + 1, size + half
    if size > count:
        size = count
    return in_values, place, size


@inlined_kernel
def _copy_run(array: KVArray, at: int, count: int, out: Float32Array, to: int) -> None:
    """Copy bytes that lie side by side: most runs are whole lines, and need no function."""
    while count >= LINE:
        _copy_line(array, at, out, to)
        at, to, count = at + LINE, to + LINE, count - LINE
    if count > 0:
        _copy_bytes(array, at, out, to, count)


@inlined_kernel
def copy_bytes(source: BlockBytes, at: int, count: int, raw: Float32Array, to: int) -> None:
    """Copy ``count`` bytes of a block, from byte ``at`` on, to byte ``to`` of ``raw``."""
    while count > 0:
        in_values, place, size = find_run(source, at, count)
        if in_values:
            _copy_run(source.cache.values, place, size, raw, to)
        else:
            _copy_run(source.cache.keys, place, size, raw, to)
        at, to, count = at + size, to + size, count - size


@inlined_kernel
def copy_halves(
    source: BlockBytes, at: int, count: int, raw: Float32Array, out: Float32Array, to: int
) -> None:
    """Write ``count`` float16 of a block, from byte ``at`` on, to out[to:] in whole vectors."""
    copy_bytes(source, at, count * HALF, raw, 0)
    for i in range(0, count, LANES):
        store(out, to + i, _load_halves(raw, i * HALF))


@kernel
def prefetch_bytes(source: BlockBytes, at: int, count: int) -> None:
    """Prefetch ``count`` bytes of a block, from byte ``at`` on."""
    while count > 0:
        in_values, place, size = find_run(source, at, count)
        for line in range(place, place + size, LINE):
            if in_values:
                _prefetch_line(source.cache.values, line)
            else:
                _prefetch_line(source.cache.keys, line)
        at, count = at + size, count - size
