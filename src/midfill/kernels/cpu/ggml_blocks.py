"""GGML's blocks of quantised weights, taken apart into quants and scales.

Where a block keeps which bits is a fact of the format, read from GGML's ``ggml-common.h`` and
``ggml-quants.c``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from midfill.kernels.cpu.weight_formats import EXPERT_LAYOUTS, GROUP, WeightFormat
from midfill.stored_tensor import StoredTensor, mxfp4_blocks

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]
Integers = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Quants:
    """A quantised matrix [n, k], as the formats of weight_formats.py divide it.

    Attributes:
        quants: uint8 [n, k / 32, 32].
        scales: [n, blocks]; of MXFP4 uint8, exponents.
        minima: [n, blocks]; None without minima.
        integer_scales: [n, k / 32, 1 or 2]; None where a block has one group.
        integer_minima: [n, k / 32]; None without.
    """

    quants: Bytes
    scales: Halves | Bytes
    minima: Halves | None = None
    integer_scales: Integers | None = None
    integer_minima: Integers | None = None


def split_blocks(tensor: StoredTensor) -> Quants:
    """Take a matrix of one of GGML's kinds apart.

    Raises:
        ValueError: a scale or minimum is infinite or NaN.
    """
    split, size = _SPLITS[tensor.kind]
    rows = tensor.shape[0]
    stored = tensor.data if tensor.exponents is None else mxfp4_blocks(tensor)
    data = np.ascontiguousarray(stored).view(np.uint8)
    parts = split(data.reshape(rows, -1, size))
    stated = [each for each in (parts.scales, parts.minima) if each is not None]
    if not all(np.isfinite(each).all() for each in stated):
        raise ValueError("a block's scale is infinite or NaN")
    return parts


def _halves(blocks: Bytes, at: int) -> Halves:
    """Return the float16 at a byte of each block."""
    return blocks[..., at : at + 2].copy().view(np.float16)[..., 0]


def _nibbles(packed: Bytes) -> Bytes:
    """Return low halves of all bytes, then their high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q4_0(blocks: Bytes) -> Quants:
    return Quants(_nibbles(blocks[..., 2:]), _halves(blocks, 0))


def _q4_1(blocks: Bytes) -> Quants:
    return Quants(_nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _joined(low: npt.NDArray[Any], high: npt.NDArray[Any], bits: int) -> Bytes:
    """Put high bits above ``bits`` low ones."""
    return np.bitwise_or(low, high << bits, dtype=np.uint8)


def _with_fifth_bits(low: Bytes, high: Bytes) -> Bytes:
    return _joined(low, np.unpackbits(high, axis=-1, bitorder="little"), 4)


def _q5_0(blocks: Bytes) -> Quants:
    quants = _with_fifth_bits(_nibbles(blocks[..., 6:]), blocks[..., 2:6])
    return Quants(quants, _halves(blocks, 0))


def _q5_1(blocks: Bytes) -> Quants:
    quants = _with_fifth_bits(_nibbles(blocks[..., 8:]), blocks[..., 4:8])
    return Quants(quants, _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Bytes) -> Quants:
    # In two's complement, this adds 128.
    quants = np.bitwise_xor(blocks[..., 2:], 128, dtype=np.uint8)
    return Quants(quants, _halves(blocks, 0))


def _grouped(values: Bytes) -> Bytes:
    """Reshape what each block holds of its groups: [n, blocks, 8, ...] to [n, groups, ...]."""
    return values.reshape(len(values), -1, *values.shape[3:])


def _integers_of_six_bits(packed: Bytes) -> tuple[Integers, Integers]:
    """Return the eight scales and eight minima that Q4_K and Q5_K keep in 12 bytes."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, _joined(third & 15, first >> 6, 4)], axis=-1)
    minima = np.concatenate([second & 63, _joined(third >> 4, second >> 6, 4)], axis=-1)
    return _grouped(scales[..., None]).view(np.int8), _grouped(minima).view(np.int8)


def _group_nibbles(packed: Bytes) -> Bytes:
    """Return [n, blocks, 8, 32]: each 32 bytes hold one group low and the next one high."""
    chunks = packed.reshape(*packed.shape[:2], 4, GROUP)
    return _nibbles(chunks).reshape(*packed.shape[:2], 8, GROUP)


def _q4_k(blocks: Bytes) -> Quants:
    scales, minima = _integers_of_six_bits(blocks[..., 4:16])
    quants = _grouped(_group_nibbles(blocks[..., 16:]))
    return Quants(quants, _halves(blocks, 0), -_halves(blocks, 2), scales, minima)


def _q5_k(blocks: Bytes) -> Quants:
    scales, minima = _integers_of_six_bits(blocks[..., 4:16])
    order = np.arange(8, dtype=np.uint8)[:, None]
    high = blocks[..., None, 16:48] >> order & 1
    quants = _grouped(_joined(_group_nibbles(blocks[..., 48:]), high, 4))
    return Quants(quants, _halves(blocks, 0), -_halves(blocks, 2), scales, minima)


def _q6_k(blocks: Bytes) -> Quants:
    # Each half of 128 has 64 bytes of low bits and 32 of high bits, of four groups.
    shape = blocks.shape[:2]
    low = blocks[..., :128].reshape(*shape, 2, 2 * GROUP)
    low = _nibbles(low).reshape(*shape, 2, 4, GROUP)
    order = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[..., 128:192].reshape(*shape, 2, 1, GROUP) >> order & 3
    quants = _joined(low, high, 4).reshape(*shape, 8, GROUP)
    scales = blocks[..., 192:208].reshape(*shape, 8, 2)
    return Quants(
        _grouped(quants), _halves(blocks, 208), None, _grouped(scales).view(np.int8), None
    )


def _q3_k(blocks: Bytes) -> Quants:
    # Each half of 128 has 32 bytes of low bits, of four groups; 32 bytes hold all high bits.
    shape = blocks.shape[:2]
    order = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    low = blocks[..., 32:96].reshape(*shape, 2, 1, GROUP) >> order & 3
    high = blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    quants = _joined(low.reshape(*shape, 8, GROUP), high, 2)
    packed = blocks[..., 96:108]
    highest = packed[..., None, 8:] >> order & 3
    scales = _joined(_nibbles(packed[..., :8]), highest.reshape(*shape, 16), 4)
    signed = scales.view(np.int8).reshape(*shape, 8, 2) - np.int8(32)
    integer_scales = signed.reshape(len(signed), -1, 2)
    return Quants(_grouped(quants), _halves(blocks, 108), None, integer_scales, None)


def _mxfp4(blocks: Bytes) -> Quants:
    exponents = blocks[..., 0]
    if (exponents == _NAN_EXPONENT).any():
        raise ValueError("a block's scale is infinite or NaN")
    return Quants(_nibbles(blocks[..., 1:]), exponents)


def mxfp4_in_eight_bits(tensor: StoredTensor) -> Quants | None:
    """Return MXFP4's numbers exactly, as quants of Q8_0: 128 plus twice each.

    None where a scale is none of float16.
    """
    parts = split_blocks(tensor)
    scales = np.ldexp(np.float32(1.0), parts.scales.astype(np.int32) - 128)
    scales[~(parts.quants & 7).any(axis=-1)] = 0  # blocks of zeros have any scale
    halves = scales.astype(np.float16)
    if not np.array_equal(halves.astype(np.float32), scales):
        return None
    numbers = np.array(EXPERT_LAYOUTS[WeightFormat.MXFP4].lookup, np.uint8)
    zero = EXPERT_LAYOUTS[WeightFormat.MXFP4].zero
    return Quants(numbers[parts.quants] + np.uint8(128 - zero), halves)


_NAN_EXPONENT = 255

_SPLITS: dict[str, tuple[Callable[[Bytes], Quants], int]] = {
    "q3_k": (_q3_k, 110),
    "q4_0": (_q4_0, 18),
    "q4_1": (_q4_1, 20),
    "q4_k": (_q4_k, 144),
    "q5_0": (_q5_0, 22),
    "q5_1": (_q5_1, 24),
    "q5_k": (_q5_k, 176),
    "q6_k": (_q6_k, 210),
    "q8_0": (_q8_0, 34),
    "mxfp4": (_mxfp4, 17),
}
"""How each kind's blocks are split, and their bytes."""
