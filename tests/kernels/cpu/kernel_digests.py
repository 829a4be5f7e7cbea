"""A program: what each kernel makes of fixed inputs, for test_chips.py.

Prints JSON: a digest of each kernel's results, and of which kind the machine code is. With the
argument "code" it compiles the products for the chip that Numba was told, and runs nothing.
"""

import hashlib
import json
import sys

import numpy as np
from numba import types

from midfill.kernels.cpu import attention, linear
from midfill.kernels.cpu.cells import CellFormat, allocate_cells, load_cell, write_cell
from midfill.kernels.cpu.decoder import Cells
from midfill.kernels.cpu.dots import ROUNDED_BYTES, round_row
from midfill.kernels.cpu.halves import half_to_float
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.packing import PANEL, WeightFormat, pack
from midfill.kernels.cpu.rows import LAYER, RMS, norm, rotate
from midfill.kernels.cpu.simd import exp, load, store
from midfill.kernels.cpu.team import SYNC_CELLS
from midfill.kernels.cpu.tiles import even_heights
from midfill.models.stored_tensor import StoredTensor

INSTRUCTIONS = ("zmm", "ymm", "vpdpbusd", "pmaddubsw", "pmulld", "vfmadd", "vcvtph2ps")
"""What is looked for in machine code."""

rng = np.random.default_rng(0)
NO_BYTES = np.zeros(0, np.uint8)


def normal(*shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


@kernel
def _read_halves(halves, data, vectors, scalars):  # type: ignore[no-untyped-def]
    for at in range(0, len(halves), 16):
        store(vectors, at, load_cell(halves, at))
    for i in range(len(halves)):
        scalars[i] = half_to_float(data, 2 * i)


@kernel
def _elementwise(x, exponentials, silu, gelu):  # type: ignore[no-untyped-def]
    for at in range(0, len(x), 16):
        store(exponentials, at, exp(load(x, at)))
        store(silu, at, linear.activate(load(x, at), linear.SILU))
        store(gelu, at, linear.activate(load(x, at), linear.GELU_TANH))


def halves_read() -> list[np.ndarray]:
    """All there are; of NaNs only that they are."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    out = [np.empty(len(halves), np.float32) for _ in range(2)]
    _read_halves(halves, halves.view(np.uint8), *out)
    np.testing.assert_array_equal(*out)
    for values in out:
        values[np.isnan(values)] = np.nan
    return out


def cells_written(cell_format: CellFormat) -> list[np.ndarray]:
    exponents = np.arange(-30, 17).repeat(32)
    x = normal(len(exponents)) * np.float32(2.0) ** exponents.astype(np.float32)
    # Ties between halves, what no half can hold, subnormals, zeros.
    ties = np.arange(0, 1 << 15, 97, dtype=np.uint16)[: 9 * 32].view(np.float16).astype(np.float32)
    ties += np.spacing(ties.astype(np.float16)).astype(np.float32) / 2
    special = np.zeros(32, np.float32)
    if cell_format is CellFormat.F16:
        special[:6] = np.inf, -np.inf, np.nan, 65520.0, 1e-8, -0.0
    x = np.concatenate([x, ties, special])
    cells, scales = allocate_cells(cell_format, len(x) // 32, 32)
    for cell in range(len(x) // 32):
        write_cell(x, cell * 32, 32, cells, scales, 0, cell)
    return [cells, scales]


def rows_rounded() -> list[np.ndarray]:
    x = normal(64 * 32) * np.repeat(np.float32(10.0) ** np.arange(-32, 32), 32).astype(np.float32)
    x[:32] = 0.0
    blocks = np.zeros(64 * ROUNDED_BYTES, np.uint8)
    round_row(x, 0, len(x), blocks, 0)
    return [blocks]


def rows_normed() -> list[np.ndarray]:
    x, weight, bias = normal(160), normal(160), normal(160)
    out = np.zeros((2, 160), np.float32)
    for kind in (RMS, LAYER):
        norm(kind, x, 0, 160, 1e-5, weight, bias, 0, out[kind], 0)
    return [out]


def heads_rotated() -> list[np.ndarray]:
    angles = normal(7 * 32)
    x = normal(64)
    rotate(x, 0, 32, np.cos(angles), np.sin(angles), 5, x, 0)
    return [x]


def functions() -> list[np.ndarray]:
    x = np.concatenate([np.linspace(-90, 90, 16_000, dtype=np.float32), normal(16_000)])
    x[:2] = -np.inf, 0.0
    out = [np.empty_like(x) for _ in range(3)]
    _elementwise(x, *out)
    return out


def products(weight_format: WeightFormat) -> list[np.ndarray]:
    """Any number of rows: 1 to 8 at once, and more than that."""
    matrix = pack([StoredTensor("w", (70, 96), "f32", normal(70, 96))], weight_format)
    x = normal(11, 96)
    x[5] *= 1e-3
    blocks = np.zeros(x.size // 32 * ROUNDED_BYTES, np.uint8)
    round_row(x.reshape(-1), 0, x.size, blocks, 0)
    results = []
    dense = weight_format is WeightFormat.F32
    heights = even_heights(linear.MAX_TILE_ROWS if dense else linear.MAX_CODE_ROWS)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 11):
        out = np.zeros(rows * 96, np.float32)
        linear.linear(
            np.zeros(SYNC_CELLS, np.int64), 1, x.reshape(-1), blocks, 0, rows, 96, matrix.data, 0,
            int(weight_format), 70, np.linspace(-1, 1, 96, dtype=np.float32), 0, out, 96, False,
            1.0, heights, np.empty(linear.MAX_TILE_ROWS * PANEL, np.float32),
        )  # fmt: skip
        results.append(out)
    return results


def embeddings() -> list[np.ndarray]:
    results = []
    for weight_format in WeightFormat:
        matrix = pack([StoredTensor("w", (40, 64), "f32", normal(40, 64))], weight_format)
        for token in (0, 20, 39):
            results.append(np.zeros(64, np.float32))
            linear.embed(token, matrix.data, int(weight_format), 64, 1.5, results[-1], 0)
    return results


def attended() -> list[np.ndarray]:
    """Several heads a KV head over float16 cells, keys in place (1, 3 rows) and turned (9)."""
    dim, slots = 96, 300
    pool = []
    for _ in range(2):
        cells, scales = allocate_cells(CellFormat.F16, slots, dim)
        values = normal(slots * dim)
        for slot in range(slots):
            write_cell(values, slot * dim, dim, cells, scales, 0, slot)
        pool.append(cells)
    none = np.zeros(0, np.float32)
    keys = np.array([0, slots], np.int32)
    order = rng.permutation(slots).astype(np.int32)
    results = []
    for rows in (1, 3, 9):
        items = np.zeros((2, attention.ITEM_FIELDS), np.int32)
        one = np.array([0, 1], np.int32)
        items[0] = 0, 0, 1, 0
        out = np.zeros(rows * dim, np.float32)
        attention.attend(
            np.zeros(SYNC_CELLS, np.int64), items, 1, 0, one, keys, order, normal(rows * dim),
            rows * dim, Cells(*pool, none, none), 0, slots, rows, 1, dim, 0.1, 0, out, NO_BYTES,
            np.zeros(attention.scratch_size(rows, dim), np.float32), none, none,
        )  # fmt: skip
        results.append(out)
    return results


def digest(arrays: list[np.ndarray]) -> str:
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(array.tobytes())
    return whole.hexdigest()[:16]


def instructions() -> list[str]:
    """Which of INSTRUCTIONS the products are made of."""
    (code,) = linear.linear.inspect_asm().values()
    return [name for name in INSTRUCTIONS if name in code]


def main() -> None:
    if sys.argv[1:] == ["code"]:
        floats, octets, whole = types.float32[::1], types.uint8[::1], types.int64
        linear.linear.compile(
            (types.int64[::1], whole, floats, octets, whole, whole, whole, octets, whole, whole,
             whole, floats, whole, floats, whole, types.boolean, types.float64, octets, floats)
        )  # fmt: skip
        print(json.dumps({"instructions": instructions()}))
        return
    results = {
        "halves read": digest(halves_read()),
        "halves written": digest(cells_written(CellFormat.F16)),
        "codes written": digest(cells_written(CellFormat.I8)),
        "rows rounded": digest(rows_rounded()),
        "norms": digest(rows_normed()),
        "rotary embedding": digest(heads_rotated()),
        "exponential, SiLU, GELU": digest(functions()),
        "embeddings": digest(embeddings()),
        "attention": digest(attended()),
    }
    for weight_format in WeightFormat:
        results[f"products {weight_format.name}"] = digest(products(weight_format))
    print(json.dumps({"digests": results, "instructions": instructions()}))


if __name__ == "__main__":
    main()
