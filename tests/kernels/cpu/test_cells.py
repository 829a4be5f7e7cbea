"""KV cells: what is written is what numpy would round it to, and what the kernels read back."""

import numpy as np
import pytest

from midfill.kernels.cpu.cells import (
    CellFormat,
    allocate_cells,
    cell_bytes,
    load_cell,
    write_cell,
)
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.simd import store

DIM = 32


@kernel
def _read(cells, out):  # type: ignore[no-untyped-def]
    for d in range(0, len(out), 16):
        store(out, d, load_cell(cells, d))


def round_trip(values: np.ndarray, cell_format: CellFormat) -> tuple[np.ndarray, np.ndarray]:
    """The stored array, and what is read of it without scales."""
    cells, scales = allocate_cells(cell_format, len(values) // DIM, DIM)
    for cell in range(len(values) // DIM):
        write_cell(values, cell * DIM, DIM, cells, scales, 0, cell)
    out = np.empty(len(values), np.float32)
    _read(cells, out)
    return cells, out


def test_halves_are_rounded_to_nearest_as_numpy_does() -> None:
    rng = np.random.default_rng(0)
    # Every exponent that float16 knows, and smaller ones: subnormals, zeros and ties.
    values = (rng.normal(size=64_000) * 2.0 ** rng.integers(-28, 15, 64_000)).astype(np.float32)
    values[:4096] = np.arange(0x3C00, 0x4C00, dtype=np.uint16).view(np.float16)
    values[:2048] += np.spacing(values[:2048].astype(np.float16)).astype(np.float32) / 2
    cells, out = round_trip(values, CellFormat.F16)
    expected = values.astype(np.float16)
    np.testing.assert_array_equal(cells, expected.view(np.uint16))
    np.testing.assert_array_equal(out, expected.astype(np.float32))


def test_what_is_too_large_for_a_half_becomes_the_largest_half() -> None:
    values = np.zeros(DIM, np.float32)
    values[:5] = 1e6, -1e6, 65519, np.inf, -np.inf
    _, out = round_trip(values, CellFormat.F16)
    np.testing.assert_array_equal(out[:5], [65504, -65504, 65504, 65504, -65504])


def test_codes_err_by_at_most_half_a_step_of_their_own_cell() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(size=(50, DIM)).astype(np.float32) * 10.0 ** rng.integers(-3, 4, (50, 1))
    values = values.astype(np.float32)
    values[7] = 0
    cells, scales = allocate_cells(CellFormat.I8, 50, DIM)
    for cell in range(50):
        write_cell(values.reshape(-1), cell * DIM, DIM, cells, scales, 0, cell)
    back = cells.reshape(50, DIM) * scales[:, None]
    assert (np.abs(back - values) <= np.abs(values).max(axis=1, keepdims=True) / 253).all()
    _, codes = round_trip(values.reshape(-1), CellFormat.I8)
    np.testing.assert_array_equal(codes.reshape(50, DIM), cells.reshape(50, DIM))


@pytest.mark.parametrize("cell_format", list(CellFormat))
def test_sizes_are_those_of_the_arrays(cell_format: CellFormat) -> None:
    cells, scales = allocate_cells(cell_format, 10, DIM)
    assert cells.nbytes + scales.nbytes == 10 * cell_bytes(cell_format, DIM)
