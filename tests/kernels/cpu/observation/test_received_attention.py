"""What keys receive against weights that are made for one row at a time in float64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.kernels.cpu.observation.received_attention import received_attention


def naive_sums(
    queries: np.ndarray, keys: np.ndarray, rows: np.ndarray, window: int | None
) -> np.ndarray:
    received = np.zeros(len(keys))
    for head in queries.astype(np.float64):
        for query, row in zip(head, rows, strict=True):
            first = 0 if window is None else max(row + 1 - window, 0)
            weights = np.exp(keys[first : row + 1] @ query)
            received[first : row + 1] += weights / weights.sum()
    return received


@st.composite
def observations(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int | None]:
    count = draw(st.integers(1, 70))
    rows = sorted(draw(st.sets(st.integers(0, count - 1), max_size=20)))
    heads, head_dim = draw(st.integers(1, 3)), draw(st.sampled_from((4, 16, 80)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    queries = rng.normal(size=(heads, len(rows), head_dim)).astype(np.float32)
    keys = rng.normal(size=(count, head_dim)).astype(np.float32)
    window = draw(st.none() | st.integers(1, 40))
    return queries, keys, np.array(rows, np.int32), window


@given(observations())
def test_a_key_receives_the_sum_of_the_rows_weights(
    observation: tuple[np.ndarray, np.ndarray, np.ndarray, int | None],
) -> None:
    queries, keys, rows, window = observation
    # Two units in float32's last place per weight, of scores up to about 30.
    np.testing.assert_allclose(
        received_attention(queries, keys, rows, window),
        naive_sums(queries, keys, rows, window),
        atol=1e-4,
    )


def test_large_scores_dont_overflow() -> None:
    queries, keys = np.full((1, 1, 16), 50, np.float32), np.ones((3, 16), np.float32)
    received = received_attention(queries, keys, np.array([2], np.int32), None)
    assert received == pytest.approx([1 / 3] * 3)


def test_no_rows_leave_every_key_with_nothing() -> None:
    queries, keys = np.zeros((2, 0, 16), np.float32), np.ones((5, 16), np.float32)
    assert received_attention(queries, keys, np.zeros(0, np.int32), None).tolist() == [0] * 5


def test_the_order_of_calls_changes_no_bit() -> None:
    rng = np.random.default_rng(0)
    queries = rng.normal(size=(3, 64, 64)).astype(np.float32)
    keys, rows = rng.normal(size=(200, 64)).astype(np.float32), np.arange(136, 200, dtype=np.int32)
    first = received_attention(queries, keys, rows, None)
    received_attention(queries[:, :7], keys[:50], rows[:7] - 136, None)
    np.testing.assert_array_equal(received_attention(queries, keys, rows, None), first)
