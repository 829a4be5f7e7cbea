"""Merging a LoRA into a weight: the update's product, and its addition to a quantised matrix.

The product is not left to NumPy. With as few columns as a rank has, BLAS gains nothing from its
threads, and where another program keeps one core busy, waiting for them takes ten times as long.

A quantised matrix keeps its kind and thereby its size and speed. Its weights lie exactly on their
grid: weight = quant x scale + minimum, with one scale per group of 32 inputs. A fine-tuning update
is mostly much smaller than a grid step. Rounding every weight to the nearest point of the old grid
would lose the update. A new grid for the sum adds a second full rounding error to the first. The
rules of ``Rounding`` are ways out of that; measurement decides which of them costs a model least.

Vector lanes run over 16 rows, so the work along a row can be sequential.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from midfill.arrays import Float32Array
from midfill.errors import CheckpointError
from midfill.kernels.cpu import simd
from midfill.kernels.cpu.calls import EntryCall
from midfill.kernels.cpu.halves import half_to_float
from midfill.kernels.cpu.jit import (
    allocating_entry_point,
    entry_point,
    in_child,
    kernel,
)
from midfill.kernels.cpu.simd import LANES
from midfill.models.checkpoints.lora_update import (
    DEFAULT_ROUNDING,
    LoraUpdate,
    ReplacedRows,
    Rounding,
)
from midfill.stored_tensor import StoredTensor, quantized
from midfill.system.machine import available_threads

Bytes = npt.NDArray[np.uint8]
_FLOATS = ("f32", "f16", "bf16")
_FALLBACK = "q8_0"  # for kinds that can't be written; eight bits lose next to nothing

GROUP = 32
_NEAREST, _DIFFUSION, _STOCHASTIC = range(3)
_RULES = dict(zip(get_args(Rounding), (_NEAREST, _DIFFUSION, _STOCHASTIC), strict=True))


@dataclass(frozen=True)
class BlockLayout:
    """How a GGML kind lays out a block of 32 weights: weight = (quant - zero) * scale + minimum.

    Attributes:
        size: bytes per block; the float16 scale comes first.
        bits: bits per quant: 4, 5 or 8. Quants are counted from 0 here.
        quants_at: byte where the quants' low four bits (or whole bytes) begin.
        has_minimum: whether a float16 minimum follows the scale; otherwise it is 0.
        zero: the quant of weight ``minimum``.
    """

    size: int
    bits: int
    quants_at: int
    has_minimum: bool
    zero: int

    @property
    def top(self) -> int:
        """The largest quant."""
        return (1 << self.bits) - 1


BLOCK_LAYOUTS = {
    "q4_0": BlockLayout(18, 4, 2, False, 8),
    "q4_1": BlockLayout(20, 4, 4, True, 0),
    "q5_0": BlockLayout(22, 5, 6, False, 16),
    "q5_1": BlockLayout(24, 5, 8, True, 0),
    "q8_0": BlockLayout(34, 8, 2, False, 128),
}
"""Layouts of the kinds that updates can be added to, by kind."""


def merge(
    tensor: StoredTensor,
    update: LoraUpdate | None,
    rows: ReplacedRows | None,
    rounding: Rounding,
    *,
    exact: bool,
) -> StoredTensor:
    """Return a base's tensor with what an adapter changes of it; see ``AdaptedCheckpoint``.

    Args:
        tensor: the base's.
        update: is added; None adds nothing.
        rows: replace those of a few tokens; None replaces none.
        rounding: how sums are rounded to quants.
        exact: whether the result is float32, whatever the base stores.

    Raises:
        CheckpointError: the adapter holds values that are not finite.
    """
    changes = [] if update is None else [update.down, update.up]
    changes += [] if rows is None else [rows.values]
    if not all(np.isfinite(values).all() for values in changes):
        raise CheckpointError(f"the adapter's values for {tensor.name!r} are not finite")
    if update is not None:
        tensor = _updated(tensor, update, rounding, exact)
    if rows is not None:
        tensor = _with_rows(tensor, rows, exact)
    return tensor


def merged_kind(kind: str, *, exact: bool) -> str:
    """Return the kind of a base's tensor once something is merged into it.

    It stays where it is one of ``BLOCK_LAYOUTS``, is "q8_0" where the base has another quantised
    kind, and "f32" where the base stores floats, or where the result shall be ``exact``.
    """
    if exact or kind in _FLOATS:
        return "f32"
    return kind if kind in BLOCK_LAYOUTS else _FALLBACK


def _updated(
    tensor: StoredTensor, update: LoraUpdate, rounding: Rounding, exact: bool
) -> StoredTensor:
    matrix, kind = update_matrix(update), merged_kind(tensor.kind, exact=exact)
    if kind in BLOCK_LAYOUTS and kind == tensor.kind:
        return add_to_quantized(tensor, matrix, rounding)
    return _stored(tensor.name, tensor.to_float32() + matrix, kind)


def _with_rows(tensor: StoredTensor, rows: ReplacedRows, exact: bool) -> StoredTensor:
    where, kind = list(rows.token_ids), merged_kind(tensor.kind, exact=exact)
    if kind in BLOCK_LAYOUTS and kind == tensor.kind:
        data = np.array(tensor.data)
        data[where] = quantized(tensor.name, rows.values, kind).data
        return StoredTensor(tensor.name, tensor.shape, kind, data)
    values = tensor.to_float32().copy()
    values[where] = rows.values
    return _stored(tensor.name, values, kind)


def _stored(name: str, values: Float32Array, kind: str) -> StoredTensor:
    if kind == "f32":
        return StoredTensor(name, values.shape, kind, values)
    return quantized(name, values, kind)


def update_matrix(update: LoraUpdate) -> Float32Array:
    """Return the whole update, float32 [outputs, inputs]: the transpose of a C-ordered array.

    Each element is summed over the rank from first to last with fused multiply-adds, so the result
    is the same on every machine.
    """
    outputs, rank = update.up.shape
    inputs = update.down.shape[1]
    rows = outputs + -outputs % LANES
    scaled = np.zeros((rank, rows), np.float32)
    scaled[:, :outputs] = update.up.T * np.float32(update.scale)
    product = np.empty((inputs, rows), np.float32)
    down = _read_only(np.ascontiguousarray(update.down.T))
    run_over_rows(_multiply, rows, scaled.reshape(-1), down, rank, inputs, product.reshape(-1))
    return product[:, :outputs].T


def add_to_quantized(
    tensor: StoredTensor, update: Float32Array, rounding: Rounding = DEFAULT_ROUNDING
) -> StoredTensor:
    """Return a quantised matrix plus an update, in the same kind.

    Args:
        tensor: [outputs, inputs] of a kind in ``BLOCK_LAYOUTS``.
        update: float32 [outputs, inputs]; the transpose of a C-ordered array is not copied.
        rounding: the rule.
    """
    layout = BLOCK_LAYOUTS[tensor.kind]
    rows, inputs = tensor.shape
    missing = -rows % LANES
    source = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(rows, -1)
    columns = np.ascontiguousarray(update.T, np.float32)  # [inputs, outputs]
    if missing:
        source = np.concatenate([source, np.zeros((missing, source.shape[1]), np.uint8)])
        columns = np.pad(columns, ((0, 0), (0, missing)))
    result = source.copy()
    numbers = (layout.size, layout.bits, layout.quants_at, layout.has_minimum, float(layout.zero))
    flat = (_read_only(source), _read_only(columns), inputs // GROUP)
    if rounding == "nearest":
        extremes = np.empty((2, len(source), inputs // GROUP), np.float32)
        run_over_rows(_find_extremes, len(source), *flat, *numbers, extremes.reshape(-1))
        _write_grid(result, extremes[0], extremes[1], layout)
    run_over_rows(_round_rows, len(source), *flat, *numbers, _RULES[rounding], result.reshape(-1))
    return StoredTensor(tensor.name, tensor.shape, tensor.kind, result[:rows])


def _write_grid(
    blocks: Bytes, smallest: Float32Array, largest: Float32Array, layout: BlockLayout
) -> None:
    """Write scales and minima that span each group's range from smallest to largest weight."""
    header = blocks.reshape(*smallest.shape, layout.size)
    if layout.has_minimum:
        scales = (largest - smallest) / layout.top
        header[..., 2:4] = smallest.astype(np.float16)[..., None].view(np.uint8)
    elif layout.bits == 8:
        scales = np.maximum(largest, -smallest) / 127
    else:
        # The grid reaches further on one side of 0; the weight furthest from 0 gets that end.
        furthest = np.where(largest > -smallest, largest, smallest)
        scales = furthest / -layout.zero
    header[..., 0:2] = scales.astype(np.float16)[..., None].view(np.uint8)


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a flat view that can't be written: kernels are compiled for one type of it only."""
    view = array.reshape(-1)
    view.flags.writeable = False
    return view


def merge_calls() -> list[EntryCall]:
    """Return the kernels that add an update to quants by the default rule, with arguments."""
    floats, quants = np.zeros(LANES, np.float32), np.zeros(LANES, np.uint8)
    given, rows = _read_only(floats.copy()), (0, LANES, LANES)
    flat, numbers = (_read_only(quants.copy()), given, 1), (1, 4, 1, False, 0.0)
    return [
        (_multiply, (*rows, floats, given, 1, 1, floats)),
        (_round_rows, (*rows, *flat, *numbers, _RULES[DEFAULT_ROUNDING], quants)),
    ]


def run_over_rows(function: Any, rows: int, *arguments: object) -> None:
    """Call function(first, end, rows, *arguments) for ranges that cover 0 <= row < rows.

    Args:
        function: compiled to release the GIL.
        rows: a multiple of 16, as the lengths of all ranges are.
        arguments: passed on unchanged.
    """
    threads = available_threads()
    share = -(-rows // (threads * LANES)) * LANES
    tasks = [
        _pool().submit(function, first, min(first + share, rows), rows, *arguments)
        for first in range(0, rows, share)
    ]
    for task in tasks:
        task.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(available_threads(), thread_name_prefix="rows")


@in_child
@entry_point
def _multiply(
    first: int, end: int, rows: int, up: Any, down: Any, rank: int, inputs: int, product: Any
) -> None:
    """Set product[input, row] to the sum over r of down[input, r] * up[r, row].

    This is done for rows first <= row < end. Lanes run over rows. Four inputs at a time share the
    loads of ``up``.
    """
    zero = simd.splat(np.float32(0))
    tiled = inputs - inputs % 4
    for row in range(first, end, LANES):
        for column in range(0, tiled, 4):
            at = column * rank
            sum0, sum1, sum2, sum3 = zero, zero, zero, zero
            for r in range(rank):
                lanes = simd.load(up, r * rows + row)
                sum0 = simd.fma(simd.splat(down[at + r]), lanes, sum0)
                sum1 = simd.fma(simd.splat(down[at + rank + r]), lanes, sum1)
                sum2 = simd.fma(simd.splat(down[at + 2 * rank + r]), lanes, sum2)
                sum3 = simd.fma(simd.splat(down[at + 3 * rank + r]), lanes, sum3)
            simd.store(product, column * rows + row, sum0)
            simd.store(product, (column + 1) * rows + row, sum1)
            simd.store(product, (column + 2) * rows + row, sum2)
            simd.store(product, (column + 3) * rows + row, sum3)
        for column in range(tiled, inputs):
            total = zero
            for r in range(rank):
                lanes = simd.load(up, r * rows + row)
                total = simd.fma(simd.splat(down[column * rank + r]), lanes, total)
            simd.store(product, column * rows + row, total)


# ---- Compiled. Rows and inputs are counted as in ``add_to_quantized``; arrays are flat. ----------


@kernel
def _read_quants(source: Any, at: int, stride: int, bits: int, quants_at: int, quants: Any) -> None:
    """Set quants[j * 16 + lane] to quant j of the block that begins at byte at + lane * stride."""
    for lane in range(LANES):
        first = at + lane * stride + quants_at
        if bits == 8:
            for j in range(32):
                quants[j * LANES + lane] = np.float32(source[first + j] ^ np.uint8(128))
            continue
        for j in range(16):
            pair = source[first + j]
            quants[j * LANES + lane] = np.float32(pair & np.uint8(15))
            quants[(j + 16) * LANES + lane] = np.float32(pair >> np.uint8(4))
        if bits == 5:
            for j in range(32):
                fifth = (source[first - 4 + (j >> 3)] >> np.uint8(j & 7)) & np.uint8(1)
                quants[j * LANES + lane] += np.float32(16) * np.float32(fifth)


@kernel
def _write_quants(
    quants: Any, result: Any, at: int, stride: int, bits: int, quants_at: int
) -> None:
    """Write quants back; the inverse of ``_read_quants``."""
    for lane in range(LANES):
        first = at + lane * stride + quants_at
        if bits == 8:
            for j in range(32):
                result[first + j] = np.uint8(np.int32(quants[j * LANES + lane])) ^ np.uint8(128)
            continue
        for j in range(16):
            low = np.int32(quants[j * LANES + lane])
            high = np.int32(quants[(j + 16) * LANES + lane])
            result[first + j] = np.uint8((low & 15) | ((high & 15) << 4))
        if bits == 5:
            for byte in range(4):
                fifths = 0
                for bit in range(8):
                    quant = np.int32(quants[(byte * 8 + bit) * LANES + lane])
                    fifths |= int(quant >> 4) << bit
                result[first - 4 + byte] = np.uint8(fifths)


@kernel
def _read_grid(
    blocks: Any, at: int, stride: int, has_minimum: bool, zero: float, scales: Any, origins: Any
) -> None:
    """Read the scales of 16 blocks, and the weights that quant 0 stands for."""
    for lane in range(LANES):
        block = at + lane * stride
        scale = half_to_float(blocks, block)
        minimum = half_to_float(blocks, block + 2) if has_minimum else np.float32(0)
        scales[lane] = scale
        origins[lane] = minimum - np.float32(zero) * scale


@kernel
def _dither(first: int, column: int, dither: Any) -> None:
    """Fill in numbers evenly spread over (-1/2, 1/2) for 16 rows, a hash of row and column.

    They are multiples of 2^-15, so adding them to a quant is exact. A quant that nothing was added
    to therefore stays. The mixing steps are those of MurmurHash3's 32-bit finaliser.
    """
    for lane in range(LANES):
        # Numba widens products of 32-bit numbers; the casts cut them to 32 bits again.
        mixed = np.uint32((first + lane) * 0x9E3779B1)
        mixed ^= np.uint32(column * 0x85EBCA77 + 0x165667B1)
        mixed = np.uint32((mixed ^ (mixed >> np.uint32(16))) * 0x85EBCA6B)
        mixed = np.uint32((mixed ^ (mixed >> np.uint32(13))) * 0xC2B2AE35)
        mixed = np.uint32(mixed ^ (mixed >> np.uint32(16)))
        level = np.float32(np.int32(mixed >> np.uint32(18)))
        dither[lane] = (level + np.float32(0.5)) * np.float32(2**-14) - np.float32(0.5)


@allocating_entry_point
def _find_extremes(
    first: int, end: int, rows: int, source: Any, update: Any, groups: int,
    size: int, bits: int, quants_at: int, has_minimum: bool, zero: float, extremes: Any,
) -> None:  # fmt: skip
    """Set extremes[0 or 1, row, group] to the smallest and largest sum of weight and update."""
    quants = np.empty(GROUP * LANES, np.float32)
    scales = np.empty(LANES, np.float32)
    origins = np.empty(LANES, np.float32)
    smallest = np.empty(LANES, np.float32)
    largest = np.empty(LANES, np.float32)
    stride = groups * size
    negative = simd.splat(np.float32(-1))
    for row in range(first, end, LANES):
        for group in range(groups):
            at = row * stride + group * size
            _read_quants(source, at, stride, bits, quants_at, quants)
            _read_grid(source, at, stride, has_minimum, zero, scales, origins)
            scale, origin = simd.load(scales, 0), simd.load(origins, 0)
            high = simd.splat(np.float32(-np.inf))
            low = simd.splat(np.float32(-np.inf))  # of the negated sums
            for j in range(GROUP):
                weight = simd.fma(simd.load(quants, j * LANES), scale, origin)
                value = simd.add(weight, simd.load(update, (group * GROUP + j) * rows + row))
                high = simd.maximum(high, value)
                low = simd.maximum(low, simd.multiply(value, negative))
            simd.store(smallest, 0, simd.multiply(low, negative))
            simd.store(largest, 0, high)
            for lane in range(LANES):
                extremes[(row + lane) * groups + group] = smallest[lane]
                extremes[(rows + row + lane) * groups + group] = largest[lane]


@in_child
@allocating_entry_point
def _round_rows(
    first: int, end: int, rows: int, source: Any, update: Any, groups: int,
    size: int, bits: int, quants_at: int, has_minimum: bool, zero: float, rule: int, result: Any,
) -> None:  # fmt: skip
    """Write the quants of rows first <= row < end into ``result``, which holds the grids already.

    In units of the new grid's step, a weight is old quant * ratio + offset, and the update is
    multiplied by inverse. Where the grid stays, ratio is 1 and offset is 0.
    """
    quants = np.empty(GROUP * LANES, np.float32)
    scales = np.empty(LANES, np.float32)
    origins = np.empty(LANES, np.float32)
    steps = np.empty(LANES, np.float32)
    new_origins = np.empty(LANES, np.float32)
    inverses = np.empty(LANES, np.float32)
    dither = np.zeros(LANES, np.float32)
    stride = groups * size
    nothing = simd.splat(np.float32(0))
    negative = simd.splat(np.float32(-1))
    lowest = simd.splat(np.float32(-((1 << bits) - 1)))
    # Adding and subtracting 3 * 2^22 rounds a float32 to the nearest whole number.
    whole = simd.splat(np.float32(3 * 2**22))
    keep = simd.splat(np.float32(1 if rule == _DIFFUSION else 0))
    for row in range(first, end, LANES):
        carry = nothing
        if rule == _DIFFUSION:
            _dither(row, 0, dither)
        for group in range(groups):
            at = row * stride + group * size
            _read_quants(source, at, stride, bits, quants_at, quants)
            _read_grid(source, at, stride, has_minimum, zero, scales, origins)
            _read_grid(result, at, stride, has_minimum, zero, steps, new_origins)
            for lane in range(LANES):
                # Where all weights of a group are the same there is nothing to round to.
                step = steps[lane]
                inverse = np.float32(1) / step if step != 0 else np.float32(0)
                inverses[lane] = inverse
                if rule == _NEAREST:
                    origins[lane] = (origins[lane] - new_origins[lane]) * inverse
                    scales[lane] *= inverse
                else:
                    origins[lane] = np.float32(0)
                    scales[lane] = np.float32(1)
            step, inverse = simd.load(steps, 0), simd.load(inverses, 0)
            ratio, offset = simd.load(scales, 0), simd.load(origins, 0)
            for j in range(GROUP):
                column = group * GROUP + j
                if rule == _STOCHASTIC:
                    _dither(row, column, dither)
                before = simd.fma(simd.load(quants, j * LANES), ratio, offset)
                wanted = simd.add(simd.load(update, column * rows + row), carry)
                value = simd.maximum(simd.fma(wanted, inverse, before), nothing)
                value = simd.maximum(simd.multiply(value, negative), lowest)
                value = simd.subtract(simd.load(dither, 0), value)
                quant = simd.subtract(simd.add(value, whole), whole)
                simd.store(quants, j * LANES, quant)
                moved = simd.subtract(before, quant)
                carry = simd.multiply(simd.fma(moved, step, wanted), keep)
            _write_quants(quants, result, at, stride, bits, quants_at)
