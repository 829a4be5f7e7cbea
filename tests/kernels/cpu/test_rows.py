"""Norms and the rotary embedding against NumPy."""

import numpy as np
import pytest

from midfill.kernels.cpu.rows import LAYER, RMS, NormWeights, RopeTables, norm, rotate

ROWS = np.random.default_rng(0)


@pytest.mark.parametrize("half", [4, 8, 16, 24, 32, 40, 48, 64, 128])
def test_a_head_is_rotated_in_place_and_nothing_beside_it(half: int) -> None:
    before = ROWS.standard_normal(2 * half + 10).astype(np.float32)
    angles = ROWS.standard_normal((3, half))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    after = before.copy()
    rotate(after, 5, RopeTables(cos.ravel(), sin.ravel(), half, np.zeros(1, np.int32)), 0, 2)
    low, high = before[5 : 5 + half], before[5 + half : 5 + 2 * half]
    np.testing.assert_array_equal(after[5 : 5 + half], low * cos[2] - high * sin[2])
    np.testing.assert_array_equal(after[5 + half : 5 + 2 * half], high * cos[2] + low * sin[2])
    np.testing.assert_array_equal(
        after[[*range(5), *range(-5, 0)]], before[[*range(5), *range(-5, 0)]]
    )


@pytest.mark.parametrize("kind", [RMS, LAYER])
@pytest.mark.parametrize("size", [16, 48, 576])
def test_a_layers_norm(kind: int, size: int) -> None:
    x = ROWS.standard_normal(size + 16).astype(np.float32) + 3
    weight, bias = ROWS.standard_normal((2, size)).astype(np.float32)
    out = np.zeros(size, np.float32)
    stacked = NormWeights(np.append(bias, weight), np.append(weight, bias), size, kind, 1e-5)
    norm(x, 16, stacked, 1, out, 0)
    row = x[16:].astype(np.float64)
    if kind == LAYER:
        row = row - row.mean()
    wanted = row / np.sqrt((row**2).mean() + 1e-5) * weight + (bias if kind == LAYER else 0)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)
