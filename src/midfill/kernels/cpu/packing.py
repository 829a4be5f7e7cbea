"""Packed weights: the one copy of a weight matrix, which all CPU kernels read.

weight_formats.py says how panels store weights. Each panel of a matrix may have its own format, so
that matrices of different kinds can lie one below the other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from midfill.kernels.cpu.ggml_blocks import Quants, mxfp4_in_eight_bits, split_blocks
from midfill.kernels.cpu.weight_formats import (
    GROUP,
    PANEL,
    BlockLayout,
    WeightFormat,
    layout_of,
    panel_bytes,
    panel_count,
)
from midfill.stored_tensor import StoredTensor

Bytes = npt.NDArray[np.uint8]

_CHUNK_WEIGHTS = 1 << 20
"""Weights that are packed at a time: what they take in between fits a few megabytes.

With larger arrays, half of the time goes into pages that the system clears for each.
"""
_FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class PackedMatrix:
    """A weight matrix in panels.

    Attributes:
        outputs, inputs: logical shape; inputs are a multiple of 32.
        data: uint8, all panels.
        panels: int64 [panels, 2], the first byte and the WeightFormat of each.
    """

    outputs: int
    inputs: int
    data: Bytes
    panels: npt.NDArray[np.int64]


def natural_format(kind: str) -> WeightFormat:
    """Return the format that holds a stored kind exactly; Q8_0 for kinds that none does.

    Rounded to eight bits, kinds of two to four lose next to nothing, and MXFP4 nothing.
    """
    if kind in _FLOATS:
        return WeightFormat.F32
    if kind == "mxfp4":  # whose own format is for experts alone
        return WeightFormat.Q8_0
    return WeightFormat.__members__.get(kind.upper(), WeightFormat.Q8_0)


def packed_bytes(shapes: Sequence[tuple[int, ...]], weight_formats: Sequence[WeightFormat]) -> int:
    """Return the bytes of matrices packed one below the other."""
    pairs = zip(shapes, weight_formats, strict=True)
    return sum(panel_count(shape[0]) * panel_bytes(kind, shape[1]) for shape, kind in pairs)


def pack(
    tensors: Sequence[StoredTensor],
    weight_formats: Sequence[WeightFormat],
    out: Bytes | None = None,
    interleaved: bool = False,
) -> PackedMatrix:
    """Pack matrices with equal inputs, one below the other (for example q, k and v).

    Args:
        tensors: the matrices.
        weight_formats: of each; what it doesn't hold exactly is rounded.
        out: where to put them, ``packed_bytes`` long; None allocates.
        interleaved: put the matrices' first panels side by side in memory, then their second ones
            and so on: a kernel that reads two matrices together then reads one contiguous run.
            The table of panels is the same but for where they lie.

    Raises:
        ValueError: a matrix but the last has outputs that are no multiple of 32, matrices to
            interleave have different numbers of outputs, or a block's scale is infinite or NaN;
            the tensor is named.
    """
    if interleaved and len({tensor.shape[0] for tensor in tensors}) > 1:
        listed = ", ".join(f"{tensor.name} has {tensor.shape[0]}" for tensor in tensors)
        raise ValueError(f"different numbers of outputs: {listed}")
    if any(tensor.shape[0] % PANEL for tensor in tensors[:-1]):
        raise ValueError("only the last of several matrices may need padding")
    inputs = tensors[0].shape[1]
    if out is None:
        out = np.empty(packed_bytes([t.shape for t in tensors], weight_formats), np.uint8)
    counts = [panel_count(tensor.shape[0]) for tensor in tensors]
    sizes = [panel_bytes(weight_format, inputs) for weight_format in weight_formats]
    panels: list[tuple[int, int]] = []
    places = _places(out, counts, sizes, interleaved)
    for tensor, weight_format, place in zip(tensors, weight_formats, places, strict=True):
        done = 0
        for chunk in _chunks(tensor):
            try:
                data = _pack_rows(chunk, weight_format).reshape(-1, place.shape[1])
            except ValueError as error:
                raise ValueError(f"tensor {tensor.name}: {error}") from None
            place[done : done + len(data)] = data
            done += len(data)
        first = place.ctypes.data - out.ctypes.data
        panels += [(first + i * place.strides[0], weight_format) for i in range(len(place))]
    outputs = sum(tensor.shape[0] for tensor in tensors)
    return PackedMatrix(outputs, inputs, out, np.array(panels, np.int64))


def _places(out: Bytes, counts: list[int], sizes: list[int], interleaved: bool) -> list[Bytes]:
    """Return where each matrix's panels go: views [panels, bytes] of ``out``."""
    if interleaved:
        return np.split(out.reshape(counts[0], -1), np.cumsum(sizes)[:-1], axis=1)
    ends = np.cumsum([count * size for count, size in zip(counts, sizes, strict=True)])
    parts = zip(np.split(out, ends[:-1]), sizes, strict=True)
    return [part.reshape(-1, size) for part, size in parts]


def _chunks(tensor: StoredTensor) -> Iterator[StoredTensor]:
    """Yield a matrix in runs of whole panels."""
    rows, inputs = tensor.shape
    step = max(PANEL, _CHUNK_WEIGHTS // inputs // PANEL * PANEL)
    data, exponents = tensor.data.reshape(rows, -1), tensor.exponents
    for start in range(0, rows, step):
        part = data[start : start + step]
        own = None if exponents is None else exponents[start : start + step]
        yield replace(tensor, shape=(len(part), inputs), data=part, exponents=own)


def _pack_rows(tensor: StoredTensor, weight_format: WeightFormat) -> Bytes:
    if weight_format is WeightFormat.F32:
        return _pack_floats(tensor.to_float32())
    quants = None
    if tensor.kind.upper() == weight_format.name:
        quants = split_blocks(tensor)
    elif tensor.kind == "mxfp4" and weight_format is WeightFormat.Q8_0:
        quants = mxfp4_in_eight_bits(tensor)
    if quants is None:
        quants = _quantise(tensor.to_float32(), weight_format)
    return _pack_quants(quants, layout_of(weight_format))


def _quantise(weights: npt.NDArray[np.float32], weight_format: WeightFormat) -> Quants:
    """Round to the nearest quant, with one scale per group of 32 inputs.

    Q8_0 is symmetric about 0; Q4_1 spans the group's smallest to largest weight.
    """
    groups = weights.reshape(weights.shape[0], -1, GROUP)
    if weight_format is WeightFormat.Q8_0:
        scales = (np.abs(groups).max(axis=-1) / 127).astype(np.float16)
        minima = None
        centred, lowest, highest, zero = groups, -127, 127, 128
    elif weight_format is WeightFormat.Q4_1:
        smallest = groups.min(axis=-1)
        minima = smallest.astype(np.float16)
        scales = ((groups.max(axis=-1) - smallest) / 15).astype(np.float16)
        centred, lowest, highest, zero = groups - minima.astype(np.float32)[..., None], 0, 15, 0
    else:
        raise ValueError(f"can't be rounded to {weight_format.name}")
    divisor = scales.astype(np.float32)[..., None]
    steps = np.divide(centred, divisor, out=np.zeros_like(centred), where=divisor != 0)
    steps = np.clip(np.rint(steps), lowest, highest)
    return Quants((steps + zero).astype(np.uint8), scales, minima)


def _panels(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Reshape [n, ...] to [panels, 32, ...], with zero rows added at the end."""
    missing = -len(values) % PANEL
    if missing:
        values = np.concatenate([values, np.zeros((missing, *values.shape[1:]), values.dtype)])
    return values.reshape(-1, PANEL, *values.shape[1:])


def _pack_floats(weights: npt.NDArray[np.float32]) -> Bytes:
    return np.ascontiguousarray(_panels(weights).transpose(0, 2, 1)).reshape(-1).view(np.uint8)


def _pack_quants(parts: Quants, layout: BlockLayout) -> Bytes:
    quants = _panels(parts.quants)
    panels, _, groups, _ = quants.shape
    blocks = np.empty((panels, groups // layout.groups, layout.block_bytes), np.uint8)
    header = blocks[..., : layout.header_bytes].view(parts.scales.dtype)
    header[..., :PANEL] = _panels(parts.scales).swapaxes(1, 2)
    if parts.minima is not None:
        header[..., PANEL:] = _panels(parts.minima).swapaxes(1, 2)
    by_group = (*blocks.shape[:2], layout.groups)
    body = blocks[..., layout.header_bytes :].reshape(*by_group, -1)  # a view
    at = 0
    if parts.integer_scales is not None:
        integers = _panels(parts.integer_scales).transpose(0, 2, 3, 1)
        at = PANEL * layout.scales
        body[..., :at] = integers.reshape(*by_group, at).view(np.uint8)
    if parts.integer_minima is not None:
        minima = _panels(parts.integer_minima).swapaxes(1, 2)
        body[..., at : at + PANEL] = minima.reshape(*by_group, PANEL).view(np.uint8)
        at += PANEL
    # Four inputs stay together, so they move as one number.
    fours = np.ascontiguousarray(quants).view(np.uint32).reshape(panels, PANEL, -1)
    vectors = np.ascontiguousarray(fours.swapaxes(1, 2)).view(np.uint8)
    vectors = vectors.reshape(*by_group, 16, 64)
    position = 0
    for bits in layout.planes:
        plane = _plane(vectors, position, bits, layout.bits)
        body[..., at : at + plane.shape[-1]] = plane
        at += plane.shape[-1]
        position += bits
    return blocks.reshape(-1)


def _plane(vectors: Bytes, position: int, bits: int, all_bits: int) -> Bytes:
    """Pack some bits of all quants: [..., 16, 64] to [..., bytes]."""
    held = np.right_shift(vectors, position, dtype=np.uint8) if position else vectors
    if position + bits < all_bits:
        held = np.bitwise_and(held, (1 << bits) - 1, dtype=np.uint8)
    shared = 8 // bits
    parts = held.reshape(*vectors.shape[:-2], -1, shared, 64)
    plane: Bytes = parts[..., 0, :]
    for i in range(1, shared):
        higher = np.left_shift(parts[..., i, :], i * bits, dtype=np.uint8)
        plane = np.bitwise_or(plane, higher, out=higher)
    return plane.reshape(*vectors.shape[:-2], -1)
