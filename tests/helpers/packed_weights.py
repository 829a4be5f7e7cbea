"""What packed weights stand for: the inverse of packing, written to be read and not to be fast."""

import numpy as np
import numpy.typing as npt

from midfill.kernels.cpu.memory import Uint8Array
from midfill.kernels.cpu.packing import PackedMatrix
from midfill.kernels.cpu.weight_formats import (
    GROUP,
    PANEL,
    BlockLayout,
    WeightFormat,
    layout_of,
    panel_bytes,
)


def unpack(matrix: PackedMatrix) -> npt.NDArray[np.float32]:
    """Return the weights as float32 [outputs, inputs], as the kernels see them."""
    rows = []
    for start, number in matrix.panels.tolist():
        weight_format = WeightFormat(number)
        panel = matrix.data[start : start + panel_bytes(weight_format, matrix.inputs)]
        if weight_format is WeightFormat.F32:
            rows.append(panel.view(np.float32).reshape(matrix.inputs, PANEL).T)
        else:
            rows.append(_unpack_panel(panel, layout_of(weight_format)))
    return np.ascontiguousarray(np.concatenate(rows)[: matrix.outputs])


def _unpack_panel(panel: Uint8Array, layout: BlockLayout) -> npt.NDArray[np.float32]:
    """Return one panel's weights [32, inputs]."""
    blocks = panel.reshape(-1, layout.block_bytes)
    header = _header(blocks[:, : layout.header_bytes].copy(), layout)
    header = header.repeat(layout.groups, axis=0)[:, None]  # [groups, 1, 32 or 64]
    body = blocks[:, layout.header_bytes :].reshape(-1, layout.group_bytes)
    scales = header[..., :PANEL]
    minima = header[..., PANEL:] if layout.has_minima else np.zeros(1)
    if layout.scales:
        integers = body[:, : layout.integer_bytes].copy().view(np.int8).astype(np.float64)
        integers = integers.reshape(len(body), -1, PANEL)
        each = integers[:, : layout.scales].repeat(layout.scaled_inputs, axis=1)
        scales = scales * each
        if layout.has_minima:
            minima = minima * integers[:, layout.scales :]
    at, position = layout.integer_bytes, 0
    vectors = np.zeros((len(body), 16, 64), np.uint8)
    for bits in layout.planes:
        shared = 8 // bits
        plane = body[:, at : at + 128 * bits].reshape(-1, 16 // shared, 1, 64)
        shifts = np.arange(shared, dtype=np.uint8)[:, None] * np.uint8(bits)
        parts = (plane >> shifts & (1 << bits) - 1).reshape(-1, 16, 64)
        vectors |= (parts << position).astype(np.uint8)
        at += 128 * bits
        position += bits
    fours = vectors.reshape(len(body), GROUP // 4, PANEL, 4).swapaxes(-1, -2)
    quants = fours.reshape(len(body), GROUP, PANEL).astype(np.float64)
    if layout.lookup:
        quants = np.array(layout.lookup, np.float64)[quants.astype(np.int64)]
    # In float64 and rounded at the end: the kernels' fused multiply-add rounds once too.
    weights = ((quants - layout.zero) * scales + minima).astype(np.float32)
    return weights.reshape(-1, PANEL).T


def _header(header: Uint8Array, layout: BlockLayout) -> npt.NDArray[np.float64]:
    """Return the scales, and minima, of blocks."""
    if layout.has_exponents:
        return np.where(header > 0, 2.0 ** (header.astype(np.float64) - 128), 0.0)
    return header.view(np.float16).astype(np.float64)
