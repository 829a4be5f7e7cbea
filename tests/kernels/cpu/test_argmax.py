"""Argmax: the token of each row's largest logit, whoever computed which columns."""

import numpy as np
import pytest

from midfill.kernels.cpu.argmax import MAXIMA_WIDTH, finish_argmax, start_argmax, update_argmax


def argmax(logits: np.ndarray, claims: list[list[tuple[int, int]]]) -> list[int]:
    """Return each row's token; ``claims`` are the columns that each thread looks at, in turn."""
    rows, vocab = logits.shape
    padded = np.full((rows, -(-vocab // 32) * 32), 9e9, np.float32)  # padding must not count
    padded[:, :vocab] = logits
    maxima = np.full((len(claims), rows * MAXIMA_WIDTH), 7.0, np.float32)  # of an earlier step
    for own, columns in zip(maxima, claims, strict=True):
        start_argmax(own, rows)
        for first, end in columns:
            for row in range(rows):
                start = row * padded.shape[1]
                update_argmax(padded.reshape(-1), start, first, min(end, vocab), own, row)
    found = np.zeros(rows, np.int32)
    for row in range(rows):
        finish_argmax(maxima, len(claims), row, found)
    tokens: list[int] = found.tolist()
    return tokens


TWO_THREADS = [[(0, 64), (96, 128)], [(64, 96), (128, 160)]]
"""Of a vocabulary of at most 160."""


@pytest.mark.parametrize("vocab", [160, 150, 129])
def test_they_are_those_of_numpy(vocab: int) -> None:
    logits = np.random.default_rng(vocab).normal(size=(40, vocab)).astype(np.float32)
    assert argmax(logits, TWO_THREADS) == logits.argmax(1).tolist()


def test_of_equal_logits_the_first_tokens_wins() -> None:
    logits = np.random.default_rng(1).integers(-2, 3, size=(60, 160)).astype(np.float32)
    logits[0] = 0.0
    logits[1, 70:] = -0.0
    for claims in (TWO_THREADS, TWO_THREADS[::-1], [[(0, 160)]]):
        assert argmax(logits, claims) == logits.argmax(1).tolist()


def test_the_largest_may_be_far_below_zero() -> None:
    logits = np.full((2, 150), -3e38, np.float32)
    logits[0, 149] = -2e38
    assert argmax(logits, TWO_THREADS) == [149, 0]


@pytest.mark.parametrize("place", [0, 77, 149])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_with_a_value_that_is_not_finite_has_none(value: float, place: int) -> None:
    logits = np.random.default_rng(2).normal(size=(3, 150)).astype(np.float32)
    best = logits.argmax(1).tolist()
    logits[1, place] = value
    assert argmax(logits, TWO_THREADS) == [best[0], -1, best[2]]


def test_a_thread_may_have_seen_nothing() -> None:
    logits = np.random.default_rng(3).normal(size=(3, 64)).astype(np.float32) - 100.0
    assert argmax(logits, [[], [(0, 64)], []]) == logits.argmax(1).tolist()
