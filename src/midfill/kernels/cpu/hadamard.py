"""The Hadamard transform, which spreads an outlier of a key or value over all of its numbers.

Quants of few bits share the range of the largest number, so one outlier costs all others their
precision, and keys have some in the same dimensions throughout. The transform is orthogonal: a
product of two transformed vectors is that of the vectors, and a weighted sum of transformed values
is the transformed sum. It is its own inverse.

Source: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", NeurIPS 2024,
arXiv 2404.00456, which transforms queries, keys and values for a quantised KV cache, too.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir

from midfill.kernels.cpu.intrinsics import generated
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.memory import Float32Array
from midfill.kernels.cpu.simd import (
    F32_VECTOR,
    I32_VECTOR,
    LANES,
    add,
    f32x16,
    load,
    multiply,
    splat,
    store,
    subtract,
)


@generated(f32x16, f32x16)
def _transform_lanes(context: Any, builder: Any, kinds: Any, value: Any) -> Any:
    """Return the transform of 16 lanes, times 4."""
    for width in (1, 2, 4, 8):
        partners = ir.Constant(I32_VECTOR, [lane ^ width for lane in range(LANES)])
        signs = ir.Constant(F32_VECTOR, [-1.0 if lane & width else 1.0 for lane in range(LANES)])
        partner = builder.shuffle_vector(value, value, partners)
        value = builder.fadd(partner, builder.fmul(value, signs))
    return value


@kernel
def hadamard(x: Float32Array, at: int, head_dim: int) -> None:
    """Transform x[at:at + head_dim] in place, in blocks of the largest power of two that fits.

    Args:
        x: float32; ``at`` and ``head_dim`` are multiples of 16.
    """
    block = head_dim & -head_dim
    factor = splat(np.float32(1.0 / math.sqrt(block)))
    for d in range(at, at + head_dim, LANES):
        store(x, d, multiply(_transform_lanes(load(x, d)), factor))
    width = LANES
    while width < block:
        for start in range(at, at + head_dim, 2 * width):
            for d in range(start, start + width, LANES):
                first, second = load(x, d), load(x, d + width)
                store(x, d, add(first, second))
                store(x, d + width, subtract(first, second))
        width *= 2
