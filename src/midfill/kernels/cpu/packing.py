"""Packed weights: the one copy of a weight matrix, which all CPU kernels read.

A matrix [n, k] is cut into panels of 32 output features (n is padded with zero rows), and a panel
into blocks of 32 inputs. Panels, and the blocks in them, are consecutive, so a kernel reads one
stream of bytes:

    Q4 block   32 scales (float16), 32 minima (float16), then 64 bytes per four inputs: byte
               4 * j + i holds the quant of output j and input i of the four in its low half, and
               that of output j + 16 in its high half
    Q8 block   32 scales, 32 minima, then 128 bytes per four inputs: byte 4 * j + i holds 128 + the
               quant of output j and input i of the four
    F32 block  32 float32 per input

A weight is quant * scale + minimum, rounded once. This holds GGML's Q4_0, Q4_1, Q5_0, Q5_1 and
Q8_0 blocks exactly (they have 32 inputs and float16 scales too), so a GGUF file of these types is
repacked without going through floats and without loss.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from midfill.models.stored_tensor import StoredTensor

PANEL = 32
GROUP = 32
HEADER_BYTES = 2 * PANEL * 2

Bytes = npt.NDArray[np.uint8]


class WeightFormat(IntEnum):
    """How a packed matrix stores its weights, in order of precision."""

    Q4 = 0
    Q8 = 1
    F32 = 2


def block_bytes(weight_format: WeightFormat) -> int:
    """Return the bytes of one block of 32 inputs and 32 outputs."""
    if weight_format is WeightFormat.F32:
        return GROUP * PANEL * 4
    return HEADER_BYTES + GROUP * (PANEL // 2 if weight_format is WeightFormat.Q4 else PANEL)


def panel_count(outputs: int) -> int:
    """Return the panels of a matrix with that many output features."""
    return -(-outputs // PANEL)


@dataclass(frozen=True)
class PackedMatrix:
    """A weight matrix in panels.

    Attributes:
        weight_format: how weights are stored.
        outputs, inputs: logical shape; inputs are a multiple of 32.
        data: uint8 [panels * inputs / 32 * block bytes].
    """

    weight_format: WeightFormat
    outputs: int
    inputs: int
    data: Bytes


@dataclass(frozen=True)
class _Quants:
    """A quantised matrix: weight[n, g * 32 + j] = quants[n, g, j] * scales[n, g] + minima[n, g]."""

    quants: npt.NDArray[np.int8] | npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]
    minima: npt.NDArray[np.float16]


_EXACT_FORMAT = {
    "q4_0": WeightFormat.Q4,
    "q4_1": WeightFormat.Q4,
    "q5_0": WeightFormat.Q8,
    "q5_1": WeightFormat.Q8,
    "q8_0": WeightFormat.Q8,
    "f32": WeightFormat.F32,
    "f16": WeightFormat.F32,
    "bf16": WeightFormat.F32,
}


def natural_format(kind: str) -> WeightFormat:
    """Return the smallest format that holds a stored kind exactly; Q8 for K-quants.

    K-quants have two levels of scales, which one float16 scale per group can't hold; eight bits
    lose next to nothing of their two to six.
    """
    return _EXACT_FORMAT.get(kind, WeightFormat.Q8)


def pack(tensors: list[StoredTensor], weight_format: WeightFormat) -> PackedMatrix:
    """Pack matrices with equal inputs, one below the other (for example q, k and v).

    Raises:
        ValueError: a matrix but the last has outputs that are no multiple of 32.
    """
    inputs = tensors[0].shape[1]
    parts = [_blocks(tensor, weight_format) for tensor in tensors]
    if any(tensor.shape[0] % PANEL for tensor in tensors[:-1]):
        raise ValueError("only the last of several matrices may need padding")
    return PackedMatrix(
        weight_format=weight_format,
        outputs=sum(tensor.shape[0] for tensor in tensors),
        inputs=inputs,
        data=np.concatenate(parts),
    )


def _blocks(tensor: StoredTensor, weight_format: WeightFormat) -> Bytes:
    if weight_format is WeightFormat.F32:
        return _pack_floats(tensor.to_float32())
    exact = _EXACT_FORMAT.get(tensor.kind, WeightFormat.F32)
    if exact is not WeightFormat.F32 and exact <= weight_format:
        quants = _ggml_quants(tensor)
    else:
        quants = _quantise(tensor.to_float32(), weight_format)
    return _pack_quants(quants, weight_format)


def _ggml_quants(tensor: StoredTensor) -> _Quants:
    """Split GGML blocks: float16 scale, float16 minimum (the _1 kinds), high bits, quants."""
    rows = tensor.shape[0]
    groups = tensor.shape[1] // GROUP
    kind = tensor.kind
    blocks = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(rows, groups, -1)
    scales = blocks[..., 0:2].copy().view(np.float16)[..., 0]
    if kind == "q8_0":
        return _Quants(blocks[..., 2:].view(np.int8), scales, np.zeros_like(scales))
    has_minimum = kind.endswith("1")
    at = 4 if has_minimum else 2
    high_bits = None
    if kind.startswith("q5"):
        high_bits = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little")
        at += 4
    packed = blocks[..., at : at + 16]
    quants = np.concatenate([packed & 15, packed >> 4], axis=-1)
    if high_bits is not None:
        quants |= high_bits << 4
    if has_minimum:
        minima = blocks[..., 2:4].copy().view(np.float16)[..., 0]
    else:
        minima = (scales * np.float16(-16 if high_bits is not None else -8)).astype(np.float16)
    return _Quants(quants, scales, minima)


def _quantise(weights: npt.NDArray[np.float32], weight_format: WeightFormat) -> _Quants:
    """Round to the nearest quant, with one scale per group of 32 inputs.

    Q8 is symmetric about 0; Q4 spans the group's smallest to largest weight.
    """
    groups = weights.reshape(weights.shape[0], -1, GROUP)
    if weight_format is WeightFormat.Q8:
        scales = (np.abs(groups).max(axis=-1) / 127).astype(np.float16)
        minima = np.zeros_like(scales)
        lowest, highest = -127, 127
    else:
        smallest = groups.min(axis=-1)
        minima = smallest.astype(np.float16)
        scales = ((groups.max(axis=-1) - smallest) / 15).astype(np.float16)
        lowest, highest = 0, 15
    divisor = scales.astype(np.float32)[..., None]
    centred = groups - minima.astype(np.float32)[..., None]
    steps = np.divide(centred, divisor, out=np.zeros_like(centred), where=divisor != 0)
    steps = np.clip(np.rint(steps), lowest, highest)
    whole = steps.astype(np.int8) if weight_format is WeightFormat.Q8 else steps.astype(np.uint8)
    return _Quants(whole, scales, minima)


def _panels(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Reshape [n, ...] to [panels, 32, ...], with zero rows added at the end."""
    missing = -len(values) % PANEL
    if missing:
        values = np.concatenate([values, np.zeros((missing, *values.shape[1:]), values.dtype)])
    return values.reshape(-1, PANEL, *values.shape[1:])


def _pack_floats(weights: npt.NDArray[np.float32]) -> Bytes:
    return np.ascontiguousarray(_panels(weights).transpose(0, 2, 1)).reshape(-1).view(np.uint8)


def _pack_quants(parts: _Quants, weight_format: WeightFormat) -> Bytes:
    quants: Bytes = _panels(parts.quants).view(np.uint8)  # [panels, n, groups, k]
    panels, _, groups, _ = quants.shape
    quants = quants.reshape(panels, PANEL, groups, -1, 4).transpose(0, 2, 3, 1, 4)
    if weight_format is WeightFormat.Q4:
        half = PANEL // 2
        quants = np.bitwise_or(quants[..., :half, :], quants[..., half:, :] << 4, dtype=np.uint8)
    else:
        # In two's complement, this adds 128.
        quants = np.bitwise_xor(quants, 128, dtype=np.uint8)
    blocks = np.empty((panels, groups, block_bytes(weight_format)), np.uint8)
    header = blocks[..., :HEADER_BYTES].view(np.float16)
    header[..., :PANEL] = _panels(parts.scales).transpose(0, 2, 1)
    header[..., PANEL:] = _panels(parts.minima).transpose(0, 2, 1)
    blocks[..., HEADER_BYTES:] = quants.reshape(panels, groups, -1)
    return blocks.reshape(-1)


def unpack(matrix: PackedMatrix) -> npt.NDArray[np.float32]:
    """Return the weights as float32 [outputs, inputs], as the kernels see them."""
    panels, groups = panel_count(matrix.outputs), matrix.inputs // GROUP
    blocks = matrix.data.reshape(panels, groups, -1)
    if matrix.weight_format is WeightFormat.F32:
        weights = blocks.view(np.float32).reshape(panels, groups, GROUP, PANEL)
    else:
        header = blocks[..., :HEADER_BYTES].view(np.float16).astype(np.float64)
        scales, minima = header[..., None, :PANEL], header[..., None, PANEL:]
        raw = blocks[..., HEADER_BYTES:].reshape(panels, groups, GROUP // 4, -1, 4)
        if matrix.weight_format is WeightFormat.Q4:
            quants = np.concatenate([raw & 15, raw >> 4], axis=-2)
        else:
            quants = (raw ^ 128).view(np.int8)
        quants = quants.swapaxes(-1, -2).reshape(panels, groups, GROUP, PANEL)
        # In float64 and rounded at the end: the kernels' fused multiply-add rounds once too.
        weights = (quants * scales + minima).astype(np.float32)
    rows = weights.transpose(0, 3, 1, 2).reshape(panels * PANEL, matrix.inputs)
    return np.ascontiguousarray(rows[: matrix.outputs])
