"""Vector operations against numpy."""

import numpy as np

from midfill.kernels.cpu import simd
from midfill.kernels.cpu.jit import kernel


@kernel
def _exp(x, out):  # type: ignore[no-untyped-def]
    for i in range(0, len(x), 16):
        simd.store(out, i, simd.exp(simd.load(x, i)))


@kernel
def _reduce(x):  # type: ignore[no-untyped-def]
    return simd.sum_lanes(simd.load(x, 0)), simd.max_lanes(simd.load(x, 0))


@kernel
def _keep(x, out, first, end):  # type: ignore[no-untyped-def]
    simd.store(out, 0, simd.keep_lanes(simd.load(x, 0), first, end, np.float32(-7.0)))


def test_exp_is_within_two_units_in_the_last_place() -> None:
    x = np.linspace(-87, 88, 160_000, dtype=np.float32)
    out = np.empty_like(x)
    _exp(x, out)
    exact = np.exp(x.astype(np.float64))
    units = np.abs(out - exact) / np.spacing(exact.astype(np.float32))
    assert units.max() <= 2


def test_exp_is_exact_where_softmax_needs_it() -> None:
    x = np.zeros(16, np.float32)
    x[1:3] = -np.inf, -1000
    out = np.empty_like(x)
    _exp(x, out)
    assert out[0] == 1.0
    assert out[1] == out[2] == 0.0


def test_reductions() -> None:
    x = np.random.default_rng(0).normal(size=16).astype(np.float32)
    total, largest = _reduce(x)
    np.testing.assert_allclose(total, x.sum(), rtol=1e-6)
    assert largest == x.max()


def test_keep_lanes_masks_outside_any_bounds() -> None:
    x = np.arange(16, dtype=np.float32)
    for first, end in [(0, 16), (3, 9), (-5, 2), (12, 99), (9, 9), (-40, -20)]:
        out = np.empty_like(x)
        _keep(x, out, first, end)
        inside = (x >= first) & (x < end)
        np.testing.assert_array_equal(out, np.where(inside, x, -7))
