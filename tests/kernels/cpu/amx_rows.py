"""Program that multiplies rows by matrices with and without AMX, for test_amx_products.py.

Reads cases from a file and writes to it what both compute, and which tile instructions ran.
"""

import ctypes
import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2] / "helpers"))
from ggml_blocks import random_matrix

from midfill.kernels.cpu import linear as kernels
from midfill.kernels.cpu.activations import ACTIVATION_BLOCK_BYTES, Activations, quantize_row
from midfill.kernels.cpu.packing import PackedMatrix, natural_format, pack
from midfill.kernels.cpu.panel_products import MAX_QUANTIZED_ROWS
from midfill.kernels.cpu.thread_pool import ThreadContext, ThreadPool
from midfill.kernels.cpu.tiles import TileRows, even_tile_rows
from midfill.kernels.cpu.weight_formats import PANEL, panel_count
from midfill.runners.cpu.amx import request_amx

CONFIGURE, RELEASE, PRODUCT = 0, 2, 6
"""Kinds of instructions that the emulator counts."""


@dataclass(frozen=True)
class Case:
    """A product.

    Attributes:
        kinds: of the matrices, one below the other, all but the last with 32 outputs.
        rows, inputs, outputs: of the product.
        heights: of tiles on AMX.
        threads: that share it.
        gated: compute an MLP's first half instead, of two such matrices.
    """

    kinds: tuple[str, ...]
    rows: int
    inputs: int
    outputs: int
    heights: tuple[int, ...]
    threads: int = 1
    gated: bool = False

    @property
    def x(self) -> np.ndarray:
        random = np.random.default_rng(self.rows * self.inputs)
        rows = random.normal(size=(self.rows, self.inputs)).astype(np.float32)
        rows[self.rows // 2] = 0.0
        rows[-1] *= np.float32(1e-30)
        return rows

    def matrix(self) -> PackedMatrix:
        *others, last = self.kinds
        sizes = [PANEL] * len(others) + [self.outputs - PANEL * len(others)]
        tensors = [
            random_matrix(kind, size, self.inputs)
            for kind, size in zip((*others, last), sizes, strict=True)
        ]
        return pack(tensors, [natural_format(tensor.kind) for tensor in tensors])

    def amx_tiles(self) -> TileRows:
        tiles = even_tile_rows(MAX_QUANTIZED_ROWS)
        for height in sorted(self.heights):
            tiles[height:] = height
        return tiles


def quants(x: np.ndarray) -> np.ndarray:
    blocks = np.zeros(x.size // 32 * ACTIVATION_BLOCK_BYTES, np.uint8)
    quantize_row(x.reshape(-1), 0, x.size, blocks, 0)
    return blocks


def multiplied(case: Case, tiles: TileRows) -> np.ndarray:
    """Return [rows, outputs] of a case, computed with some tiles."""
    matrix, x = case.matrix(), Activations(case.x.reshape(-1), quants(case.x))
    width = panel_count(matrix.outputs) * PANEL
    bias = np.linspace(-1, 1, width, dtype=np.float32)
    weights = kernels.LinearWeights(matrix.data, matrix.panels, bias, matrix.outputs, matrix.inputs)
    out = np.full((case.rows, width), np.nan, np.float32)
    clock = np.zeros((case.threads, 16), np.int64)

    def phase(thread: int, threads: int, sync: np.ndarray) -> None:
        context = ThreadContext(thread, threads, sync, clock)
        tiling = kernels.Tiling(tiles, np.zeros(kernels.PRODUCTS_SIZE, np.float32))
        if case.gated:
            both = kernels.GateUpWeights(weights, weights, kernels.SILU, True)
            result = Activations(out.reshape(-1), quants(out))
            kernels.gated_linear(context, x, 0, case.rows, both, 0, result, tiling)
        else:
            output = kernels.LinearOutput(
                out.reshape(-1), case.rows, width, False, 1.0, np.zeros(0, np.float32), False
            )
            kernels.linear(context, x, 0, weights, 0, output, tiling)

    pool = ThreadPool(case.threads)
    pool.run(phase)
    pool.close()
    return out[:, : matrix.outputs]


def counts() -> list[int]:
    """Return how many instructions of each kind have been emulated; none on a chip with AMX."""
    if "AMX_EMULATION" not in os.environ:
        return []
    emulator = ctypes.CDLL(os.environ["LD_PRELOAD"])
    emulator.amx_counts.restype = ctypes.POINTER(ctypes.c_uint64)
    return emulator.amx_counts()[:7]


def main(file: Path) -> None:
    request_amx()
    results: list[Any] = []
    for case in pickle.loads(file.read_bytes()):
        plain = multiplied(case, even_tile_rows(MAX_QUANTIZED_ROWS))
        before = counts()
        on_amx = multiplied(case, case.amx_tiles())
        ran = [after - b for after, b in zip(counts(), before, strict=True)]
        results.append((plain, on_amx, ran))
    file.write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    sys.modules["amx_rows"] = sys.modules["__main__"]  # for pickle
    main(Path(sys.argv[1]))
