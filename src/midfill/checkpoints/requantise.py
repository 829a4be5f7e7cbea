"""requantise: add a small update to a quantised matrix and keep its kind, so its size and speed.

The weights of a quantised matrix lie exactly on their grid (weight = code x scale + minimum, a
scale for each group of 32 inputs), and a fine-tuning update is mostly much smaller than a grid
step. Rounding every weight to the nearest point of that grid would lose the update; a fresh grid
for the sum adds a second full rounding error to the first. The rules, see ``Rounding``, are ways
out of that; which of them costs a model least is a matter of measurement.

Vector lanes run over 16 rows, so the work along a row can be sequential.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from midfill.checkpoints.row_threads import over_rows
from midfill.kernels.cpu import simd
from midfill.kernels.cpu.halves import half_to_float
from midfill.kernels.cpu.jit import allocating_entry_point, kernel
from midfill.kernels.cpu.simd import LANES
from midfill.models.stored_tensor import StoredTensor

Rounding = Literal["nearest", "diffusion", "stochastic"]
"""How a sum of weight and update becomes a code.

nearest: each group of 32 gets a new grid from its smallest and largest sum, and each sum the
    nearest code on it.
diffusion: the groups keep their grids. What rounding (and clamping to the grid's ends) adds to
    one weight of a row is taken from the next one, so that sums over stretches of a row's update
    are kept to about a grid step: error diffusion (Floyd and Steinberg, 1976) in one dimension.
    Each row rounds at a threshold of its own, from a hash of its number; else updates too small
    to add up to half a step along a row would be lost in all rows alike.
stochastic: the groups keep their grids, and a sum goes up or down with the probability that makes
    the expected code right. The dither is a hash of the weight's place: the same at every load.

Both of the last two are right on average, and leave a weight that nothing is added to as it is.
"""

DEFAULT_ROUNDING: Rounding = "diffusion"
"""Loses least of an update that was trained in floats."""

VERSION = 1
"""Changes whenever the same input would be rounded otherwise."""

GROUP = 32
_NEAREST, _DIFFUSION, _STOCHASTIC = range(3)
_RULES = dict(zip(get_args(Rounding), (_NEAREST, _DIFFUSION, _STOCHASTIC), strict=True))

Bytes = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class BlockLayout:
    """How a GGML kind lays out a block of 32 weights: weight = (code - zero) * scale + minimum.

    Attributes:
        size: bytes of a block; the float16 scale comes first.
        bits: of a code: 4, 5 or 8. Codes are counted from 0 here.
        codes_at: where the codes' low four bits (or whole bytes) begin.
        has_minimum: whether a float16 minimum follows the scale; otherwise it is 0.
        zero: the code of weight ``minimum``.
    """

    size: int
    bits: int
    codes_at: int
    has_minimum: bool
    zero: int

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1


LAYOUTS = {
    "q4_0": BlockLayout(18, 4, 2, False, 8),
    "q4_1": BlockLayout(20, 4, 4, True, 0),
    "q5_0": BlockLayout(22, 5, 6, False, 16),
    "q5_1": BlockLayout(24, 5, 8, True, 0),
    "q8_0": BlockLayout(34, 8, 2, False, 128),
}
"""The kinds that can be requantised."""


def requantise(
    tensor: StoredTensor, update: Float32Array, rounding: Rounding = DEFAULT_ROUNDING
) -> StoredTensor:
    """A quantised matrix plus an update, in the same kind.

    Args:
        tensor: [outputs, inputs] of a kind in ``LAYOUTS``.
        update: float32 [outputs, inputs]; no copy is made of a transposed C-ordered array.
        rounding: the rule.
    """
    layout = LAYOUTS[tensor.kind]
    rows, inputs = tensor.shape
    missing = -rows % LANES
    source = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(rows, -1)
    columns = np.ascontiguousarray(update.T, np.float32)  # [inputs, outputs]
    if missing:
        source = np.concatenate([source, np.zeros((missing, source.shape[1]), np.uint8)])
        columns = np.pad(columns, ((0, 0), (0, missing)))
    result = source.copy()
    numbers = (layout.size, layout.bits, layout.codes_at, layout.has_minimum, float(layout.zero))
    flat = (source.reshape(-1), columns.reshape(-1), inputs // GROUP)
    if rounding == "nearest":
        extremes = np.empty((2, len(source), inputs // GROUP), np.float32)
        over_rows(_find_extremes, len(source), *flat, *numbers, extremes.reshape(-1))
        _write_grid(result, extremes[0], extremes[1], layout)
    over_rows(_round_rows, len(source), *flat, *numbers, _RULES[rounding], result.reshape(-1))
    return StoredTensor(tensor.name, tensor.shape, tensor.kind, result[:rows])


def _write_grid(
    blocks: Bytes, smallest: Float32Array, largest: Float32Array, layout: BlockLayout
) -> None:
    """Write scales, and minima, that span from each group's smallest to its largest weight."""
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


# ---- compiled; rows, inputs and codes are counted as in ``requantise``, arrays are flat ----------


@kernel
def _read_codes(source: Any, at: int, stride: int, bits: int, codes_at: int, codes: Any) -> None:
    """codes[j * 16 + lane] = code j of the block that begins at byte at + lane * stride."""
    for lane in range(LANES):
        first = at + lane * stride + codes_at
        if bits == 8:
            for j in range(32):
                codes[j * LANES + lane] = np.float32(source[first + j] ^ np.uint8(128))
            continue
        for j in range(16):
            pair = source[first + j]
            codes[j * LANES + lane] = np.float32(pair & np.uint8(15))
            codes[(j + 16) * LANES + lane] = np.float32(pair >> np.uint8(4))
        if bits == 5:
            for j in range(32):
                fifth = (source[first - 4 + (j >> 3)] >> np.uint8(j & 7)) & np.uint8(1)
                codes[j * LANES + lane] += np.float32(16) * np.float32(fifth)


@kernel
def _write_codes(codes: Any, result: Any, at: int, stride: int, bits: int, codes_at: int) -> None:
    """The inverse of ``_read_codes``."""
    for lane in range(LANES):
        first = at + lane * stride + codes_at
        if bits == 8:
            for j in range(32):
                result[first + j] = np.uint8(np.int32(codes[j * LANES + lane])) ^ np.uint8(128)
            continue
        for j in range(16):
            low = np.int32(codes[j * LANES + lane])
            high = np.int32(codes[(j + 16) * LANES + lane])
            result[first + j] = np.uint8((low & 15) | ((high & 15) << 4))
        if bits == 5:
            for byte in range(4):
                fifths = 0
                for bit in range(8):
                    code = np.int32(codes[(byte * 8 + bit) * LANES + lane])
                    fifths |= int(code >> 4) << bit
                result[first - 4 + byte] = np.uint8(fifths)


@kernel
def _read_grid(
    blocks: Any, at: int, stride: int, has_minimum: bool, zero: float, scales: Any, origins: Any
) -> None:
    """Of 16 blocks: the scales, and the weights that code 0 stands for."""
    for lane in range(LANES):
        block = at + lane * stride
        scale = half_to_float(blocks, block)
        minimum = half_to_float(blocks, block + 2) if has_minimum else np.float32(0)
        scales[lane] = scale
        origins[lane] = minimum - np.float32(zero) * scale


@kernel
def _dither(first: int, column: int, dither: Any) -> None:
    """Numbers evenly spread over (-1/2, 1/2) for 16 rows, a hash of row and column.

    They are multiples of 2^-15: added to any code they are exact, so a code that nothing was added
    to always stays.  The mixing steps are those of MurmurHash3's 32-bit finaliser.
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
    size: int, bits: int, codes_at: int, has_minimum: bool, zero: float, extremes: Any,
) -> None:  # fmt: skip
    """extremes[0 or 1, row, group]: the smallest and largest sum of weight and update."""
    codes = np.empty(GROUP * LANES, np.float32)
    scales = np.empty(LANES, np.float32)
    origins = np.empty(LANES, np.float32)
    smallest = np.empty(LANES, np.float32)
    largest = np.empty(LANES, np.float32)
    stride = groups * size
    negative = simd.splat(np.float32(-1))
    for row in range(first, end, LANES):
        for group in range(groups):
            at = row * stride + group * size
            _read_codes(source, at, stride, bits, codes_at, codes)
            _read_grid(source, at, stride, has_minimum, zero, scales, origins)
            scale, origin = simd.load(scales, 0), simd.load(origins, 0)
            high = simd.splat(np.float32(-np.inf))
            low = simd.splat(np.float32(-np.inf))  # of the negated sums
            for j in range(GROUP):
                weight = simd.fma(simd.load(codes, j * LANES), scale, origin)
                value = simd.add(weight, simd.load(update, (group * GROUP + j) * rows + row))
                high = simd.maximum(high, value)
                low = simd.maximum(low, simd.multiply(value, negative))
            simd.store(smallest, 0, simd.multiply(low, negative))
            simd.store(largest, 0, high)
            for lane in range(LANES):
                extremes[(row + lane) * groups + group] = smallest[lane]
                extremes[(rows + row + lane) * groups + group] = largest[lane]


@allocating_entry_point
def _round_rows(
    first: int, end: int, rows: int, source: Any, update: Any, groups: int,
    size: int, bits: int, codes_at: int, has_minimum: bool, zero: float, rule: int, result: Any,
) -> None:  # fmt: skip
    """Write the codes of rows first <= row < end into ``result``, whose grids are there already.

    In units of the new grid's step, a weight is at old code * ratio + offset, and the update times
    inverse comes on top; ratio is 1 and offset 0 where the grid stays.
    """
    codes = np.empty(GROUP * LANES, np.float32)
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
            _read_codes(source, at, stride, bits, codes_at, codes)
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
                before = simd.fma(simd.load(codes, j * LANES), ratio, offset)
                wanted = simd.add(simd.load(update, column * rows + row), carry)
                value = simd.maximum(simd.fma(wanted, inverse, before), nothing)
                value = simd.maximum(simd.multiply(value, negative), lowest)
                value = simd.subtract(simd.load(dither, 0), value)
                code = simd.subtract(simd.add(value, whole), whole)
                simd.store(codes, j * LANES, code)
                moved = simd.subtract(before, code)
                carry = simd.multiply(simd.fma(moved, step, wanted), keep)
            _write_codes(codes, result, at, stride, bits, codes_at)
