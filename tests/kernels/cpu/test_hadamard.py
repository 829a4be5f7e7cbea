"""The Hadamard transform beside the matrix that it multiplies by."""

import numpy as np
import pytest
from four_bit_entries import hadamard_matrix

from midfill.kernels.cpu.hadamard import hadamard


@pytest.mark.parametrize(
    ("head_dim", "block"), [(16, 16), (64, 64), (80, 16), (96, 32), (128, 128), (256, 256)]
)
def test_it_multiplies_each_block_by_the_matrix(head_dim: int, block: int) -> None:
    values = np.random.default_rng(0).normal(size=2 * head_dim).astype(np.float32)
    expected = values.copy().reshape(-1, block)
    expected[head_dim // block :] = expected[head_dim // block :] @ hadamard_matrix(block)
    out = values.copy()
    hadamard(out, head_dim, head_dim)
    np.testing.assert_allclose(out, expected.reshape(-1), rtol=1e-5, atol=1e-5)
    hadamard(out, head_dim, head_dim)  # its own inverse
    np.testing.assert_allclose(out, values, rtol=1e-5, atol=1e-5)


def test_an_outlier_is_spread_over_all_numbers() -> None:
    values = np.zeros(64, np.float32)
    values[5] = 80.0
    hadamard(values, 0, 64)
    np.testing.assert_allclose(np.abs(values), 10.0, rtol=1e-6)
