"""Matrices and norms in the CPU kernels' form, made of packed arrays."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from midfill.kernels.cpu.linear import LinearWeights
from midfill.kernels.cpu.memory import Float32Array
from midfill.kernels.cpu.rows import RMS, NormWeights
from midfill.models.config import ModelConfig

Arrays = Mapping[str, Any]
"""What was packed, by name, of all layers one after the other."""

NOTHING = np.zeros(0, np.float32)
"""The bias of what has none, or a norm that a model lacks."""


def packed_matrix(
    arrays: Arrays, name: str, outputs: int, inputs: int, bias: Float32Array = NOTHING
) -> LinearWeights:
    """Return the matrix of that name, of all layers that have one; it has no weights if none has.

    Args:
        arrays: what was packed.
        name: of the matrix among them.
        outputs, inputs: its shape in one layer.
        bias: float32, of all layers: zeros where a kernel adds one that the model lacks.
    """
    return LinearWeights(
        packed=arrays.get(name, np.zeros(0, np.uint8)),
        panels=arrays.get(f"{name}.panels", np.zeros((0, 2), np.int64)),
        bias=bias,
        outputs=outputs,
        inputs=inputs,
    )


def rms_norm(config: ModelConfig, weight: Float32Array, size: int) -> NormWeights:
    """Return an RMSNorm of ``size`` numbers each, given the weights of all layers."""
    return NormWeights(weight, NOTHING, size, RMS, config.norm_epsilon)


_FAR = 40
"""A power of two whose square no mean square of a row comes near."""


def identity_norm(norm: NormWeights) -> NormWeights:
    """Return an RMSNorm that leaves rows as they are, bit for bit.

    The kernels norm whatever a layer reads, in the memory of the layer's input; so a model without
    these norms has the same kernels. Beside an epsilon of 2^80 a row's mean square is rounded away,
    if it is below 2^55. The norm then divides by 2^40 and multiplies by it, both exactly, but for
    numbers below 2^-86.

    Args:
        norm: of hidden rows, with weights of the right number.
    """
    weight = np.full_like(norm.weight, 2.0**_FAR)
    return NormWeights(weight, NOTHING, norm.size, RMS, 2.0 ** (2 * _FAR))
