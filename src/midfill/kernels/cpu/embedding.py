"""Embeddings: rows of a packed matrix, dequantised."""

import numpy as np

from midfill.kernels.cpu.halves import half_to_float
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.linear import LinearWeights
from midfill.kernels.cpu.memory import LINE, Float32Array, Uint8Array
from midfill.kernels.cpu.simd import LANES, float_at
from midfill.kernels.cpu.weight_formats import GROUP, LAYOUTS, PANEL, WeightFormat, block_bytes

_F32 = int(WeightFormat.F32)
_DENSE_BLOCK = block_bytes(WeightFormat.F32)
_LAYOUTS = list(LAYOUTS.values())
_PLANES = np.array([(*each.planes, 0)[:2] for each in _LAYOUTS])
_SHARING = np.array([[3, 3, 2, 2, 1, 1, 1, 1, 0][bits] for bits in _PLANES.ravel()]).reshape(-1, 2)
"""Powers of two: how many vectors share the bytes of a plane; see weight_formats.py."""
_HEADERS = np.array([each.header_bytes for each in _LAYOUTS])
_BLOCKS = np.array([each.block_bytes for each in _LAYOUTS])
_GROUPS = np.array([each.groups for each in _LAYOUTS])
_SCALES = np.array([each.scales for each in _LAYOUTS])
_INTEGERS = np.array([each.integer_bytes for each in _LAYOUTS])
_HAS_MINIMA = np.array([each.has_minima for each in _LAYOUTS])
_ZEROS = np.array([each.zero for each in _LAYOUTS])
"""Fields of all layouts, as kernels can read them: [format]."""


@kernel
def _gather_quants(
    packed: Uint8Array, quants: int, weight_format: int, lane: int, out: Float32Array, out_at: int
) -> None:
    """Write the quants of output ``lane`` of the group whose planes start at ``quants``."""
    for k in range(GROUP):
        out[out_at + k] = 0.0
    position = 0
    for plane in range(2):
        bits = _PLANES[weight_format, plane]
        if bits > 0:
            sharing, mask = _SHARING[weight_format, plane], (1 << bits) - 1
            byte = quants + lane % LANES * 4
            for k in range(GROUP):
                vector = k // 4 * 2 + lane // LANES
                held = np.int64(packed[byte + (vector >> sharing) * LINE + k % 4])
                shift = (vector & ((1 << sharing) - 1)) * bits
                out[out_at + k] += np.float32((held >> shift & mask) << position)
            quants += GROUP * PANEL // 8 * bits
            position += bits


@kernel
def _small_integer(packed: Uint8Array, at: int) -> float:
    """Return the int8 at a byte."""
    return np.float64(np.int8(packed[at]))


@kernel
def _embed_group(
    packed: Uint8Array, panel_at: int, weight_format: int, group: int, lane: int,
    multiplier: float, out: Float32Array, out_at: int,
) -> None:  # fmt: skip
    """Dequantise one output's weights for a group of 32 inputs."""
    groups, scales = _GROUPS[weight_format], _SCALES[weight_format]
    block = panel_at + group // groups * _BLOCKS[weight_format]
    # Numbers and their products in float64: rounded once.
    scale = np.float64(half_to_float(packed, block + lane * 2))
    minimum = np.float64(0.0)
    if _HAS_MINIMA[weight_format]:
        minimum = np.float64(half_to_float(packed, block + (PANEL + lane) * 2))
    header, integers = _HEADERS[weight_format], _INTEGERS[weight_format]
    group_bytes = (_BLOCKS[weight_format] - header) // groups
    at = block + header + group % groups * group_bytes
    if scales > 0 and _HAS_MINIMA[weight_format]:
        minimum *= _small_integer(packed, at + scales * PANEL + lane)
    _gather_quants(packed, at + integers, weight_format, lane, out, out_at)
    zero, factor = _ZEROS[weight_format], scale
    for k in range(GROUP):
        if scales > 0:
            factor = scale * _small_integer(packed, at + k * scales // GROUP * PANEL + lane)
        out[out_at + k] = ((out[out_at + k] - zero) * factor + minimum) * multiplier


@kernel
def embed(
    token: int, weights: LinearWeights, multiplier: float, out: Float32Array, out_at: int
) -> None:
    """Look up a token: out[out_at + k] = multiplier * weight of output ``token`` and input k."""
    panel, lane = token // PANEL, token % PANEL
    packed, inputs = weights.packed, weights.inputs
    base, weight_format = weights.panels[panel, 0], weights.panels[panel, 1]
    for group in range(inputs // GROUP):
        element = out_at + group * GROUP
        if weight_format == _F32:
            block = base + group * _DENSE_BLOCK
            for k in range(GROUP):
                out[element + k] = float_at(packed, block + (k * PANEL + lane) * 4) * multiplier
        else:
            _embed_group(packed, base, weight_format, group, lane, multiplier, out, element)
