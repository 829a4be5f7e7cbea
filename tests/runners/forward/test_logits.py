"""What is the same for the logits of all runners."""

import numpy as np

from midfill.runners.cpu.logits import NUMPY_LOGITS
from midfill.runners.forward.logits import argmax_tokens, log_softmax


def test_of_equal_logits_the_first_is_the_most_likely() -> None:
    logits = np.array([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]], np.float32)
    assert argmax_tokens(NUMPY_LOGITS, logits) == [1, 0]


def test_a_row_whose_largest_logit_is_not_finite_has_none() -> None:
    inf, nan = np.inf, np.nan
    rows = [[0.0, nan, 1.0], [inf, 0.0, 1.0], [-inf, -inf, -inf], [-inf, 0.0, -1.0]]
    assert argmax_tokens(NUMPY_LOGITS, np.array(rows, np.float32)) == [-1, -1, -1, 1]


def test_there_may_be_no_row() -> None:
    assert argmax_tokens(NUMPY_LOGITS, np.empty((0, 8), np.float32)) == []


def test_log_probabilities_add_up() -> None:
    logits = np.array([[1000.0, 999.0, -np.inf], [0.0, 0.0, 0.0]], np.float32)
    found = log_softmax(logits)
    np.testing.assert_allclose(np.exp(found).sum(axis=1), 1.0, rtol=1e-6)
    assert found[0, 2] == -np.inf
    np.testing.assert_allclose(found[1], -np.log(3.0), rtol=1e-6)
