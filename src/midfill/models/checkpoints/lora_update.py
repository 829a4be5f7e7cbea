"""LoraUpdate: the low-rank update that LoRA adds to one weight, and its product.

The product is not left to NumPy. With as few columns as a rank has, BLAS gains nothing from its
threads, and where another program keeps one core busy, waiting for them takes ten times as long.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from midfill.arrays import Float32Array
from midfill.kernels.cpu import simd
from midfill.kernels.cpu.jit import entry_point
from midfill.kernels.cpu.simd import LANES
from midfill.models.checkpoints.row_parallel import run_over_rows


@dataclass(frozen=True)
class LoraUpdate:
    """scale * up @ down.

    Attributes:
        down: float32 [rank, inputs], PEFT's lora_A.
        up: float32 [outputs, rank], lora_B.
        scale: lora_alpha / rank, or lora_alpha / sqrt(rank) with rsLoRA.
    """

    down: Float32Array
    up: Float32Array
    scale: float

    def matrix(self) -> Float32Array:
        """Return the whole update, float32 [outputs, inputs]: the transpose of a C-ordered array.

        Each element is summed over the rank from first to last with fused multiply-adds, so the
        result is the same on every machine.
        """
        outputs, rank = self.up.shape
        inputs = self.down.shape[1]
        rows = outputs + -outputs % LANES
        scaled = np.zeros((rank, rows), np.float32)
        scaled[:, :outputs] = self.up.T * np.float32(self.scale)
        product = np.empty((inputs, rows), np.float32)
        down = np.ascontiguousarray(self.down.T)
        run_over_rows(
            _multiply, rows, scaled.reshape(-1), down.reshape(-1), rank, inputs, product.reshape(-1)
        )
        return product[:, :outputs].T


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
