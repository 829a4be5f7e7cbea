"""Online softmax: rows over any range of keys, merged from any number of segments."""

import numpy as np
import pytest

from midfill.kernels.cpu.softmax import (
    SoftmaxSums,
    clear_states,
    finish_row,
    merge_rows,
    softmax_row,
)

DIM = 32


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def softmax(scores: np.ndarray, count: int, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return weights [count] and the row's state, for scores with noise around them."""
    padded = np.full(300, np.nan, np.float32)
    padded[16 : 16 + count] = scores[:count]
    states = np.full(4, np.nan, np.float32)
    softmax_row(padded, 16, count, first, end, states, 1)
    assert np.isnan(padded[:16]).all()
    return padded[16 : 16 + count], states[2:]


@pytest.mark.parametrize("count", [1, 16, 17, 100, 256])
@pytest.mark.parametrize(("first", "end"), [(0, 10**6), (-7, 5), (3, 16), (16, 32), (15, 90)])
def test_weights_are_exponentials_of_the_keys_in_range(count: int, first: int, end: int) -> None:
    scores = normal(256)
    weights, (peak, total) = softmax(scores, count, first, end)
    keys = np.arange(count)
    seen = (keys >= first) & (keys < end)
    np.testing.assert_array_equal(weights[~seen], 0.0)
    if not seen.any():
        assert (peak, total) == (-np.inf, 0.0)
        return
    assert peak == scores[:count][seen].max()
    np.testing.assert_allclose(weights[seen], np.exp(scores[:count][seen] - peak), rtol=1e-6)
    np.testing.assert_allclose(total, weights.sum(dtype=np.float64), rtol=1e-6)


@pytest.mark.parametrize("cuts", [[64], [16, 64], [16, 32, 48, 64], [48, 64]])
def test_merged_segments_are_the_softmax_of_all(cuts: list[int]) -> None:
    scores, values = normal(64), normal(64, DIM, seed=1)
    totals = SoftmaxSums(np.empty(2, np.float32), np.full(DIM, np.nan, np.float32))
    clear_states(totals.states, 0, 1)
    for start, end in zip([0, *cuts], cuts, strict=False):
        weights, state = softmax(scores[start:], end - start, 0, 64)
        merge_rows(totals, SoftmaxSums(state.copy(), weights @ values[start:end]), 0, 1, DIM)
    out = np.full(DIM + 16, np.nan, np.float32)
    finish_row(totals, 0, DIM, out, 16)
    exact = np.exp(scores - scores.max(), dtype=np.float64)
    np.testing.assert_allclose(out[16:], exact @ values / exact.sum(), atol=2e-6)


def test_a_segment_in_which_a_row_sees_nothing_changes_nothing() -> None:
    seen, nothing = np.array([1.5, 2.0], np.float32), np.array([-np.inf, 0.0], np.float32)
    sums, noise = normal(DIM), np.full(DIM, np.nan, np.float32)
    for total, part in (
        (SoftmaxSums(seen.copy(), sums.copy()), SoftmaxSums(nothing, noise)),
        (SoftmaxSums(nothing.copy(), noise.copy()), SoftmaxSums(seen, sums)),
    ):
        merge_rows(total, part, 0, 1, DIM)
        np.testing.assert_array_equal(total.states, seen)
        np.testing.assert_array_equal(total.sums, sums)
