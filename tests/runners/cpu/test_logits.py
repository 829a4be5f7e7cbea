"""NumPy's passes over a vocabulary, against what they are defined as."""

import math

import numpy as np
import pytest

from midfill.runners.cpu.logits import NUMPY_LOGITS, top_ids


def vector(size: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size, np.float32) * np.float32(spread)


@pytest.mark.parametrize("size", [1, 7, 255, 256, 257, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_every_token_is_drawn_as_often_as_it_is_likely(size: int, temperature: float) -> None:
    logits, draws = vector(size), (np.arange(400) + 0.5) / 400
    exact = np.exp(logits.astype(np.float64) / temperature)
    cumulative = exact.cumsum() / exact.sum()
    for draw in draws:
        (found,) = NUMPY_LOGITS.draw([logits], [temperature], [float(draw)])
        before = cumulative[found - 1] if found else 0.0
        assert before - 1e-6 <= draw <= cumulative[found] + 1e-6


def test_the_largest_draw_and_the_smallest_find_tokens_that_are_possible() -> None:
    last = math.nextafter(1.0, 0.0)
    for seed in range(50):
        logits = vector(1000, seed, spread=0.1 + seed)
        logits[:300] = logits[700:] = -np.inf
        first, end = NUMPY_LOGITS.draw([logits, logits], [1.0, 1.0], [0.0, last])
        assert 300 <= first <= end < 700


def test_the_normalizer_is_that_of_float64() -> None:
    logits = vector(49_152)
    logits[5] = -np.inf
    for temperature in (0.2, 1.0, 2.5):
        exact = np.log(np.exp(logits.astype(np.float64) / temperature).sum())
        found = NUMPY_LOGITS.log_normalizers([logits], [temperature])
        assert found.tolist() == pytest.approx([exact], abs=1e-5)


def test_the_second_largest_is_found_wherever_the_largest_is() -> None:
    for best in (0, 3, 9):
        logits = vector(10)
        logits[best] = 100.0
        rest = np.delete(logits, best).max()
        assert NUMPY_LOGITS.second_largest(logits, best) == rest


@pytest.mark.parametrize("size", [5, 640, 49_157])
@pytest.mark.parametrize("count", [1, 4, 5])
def test_the_largest_values_are_found(size: int, count: int) -> None:
    logits = vector(size)
    assert top_ids(logits, count).tolist() == sorted((-logits).argsort()[:count].tolist())


def test_of_equal_values_as_many_as_asked_for_are_found() -> None:
    assert len(top_ids(np.ones(640, np.float32), 7)) == 7
