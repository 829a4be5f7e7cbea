"""Selections: what is a valid one."""

import numpy as np
import pytest

from midfill.methods.evict.selection import Selection


def keys(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


COUNTS = keys(4, 2)


def test_heads_keep_what_they_are_given_in_order() -> None:
    selection = Selection.of_heads([keys(3, 0), keys(1)])
    selection.check(COUNTS)
    assert selection.kept.tolist() == [0, 3, 1]
    assert selection.indptr.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("kept", "indptr", "error"),
    [
        (keys(0, 4, 1), keys(0, 2, 3), "don't exist"),
        (keys(0, -1, 1), keys(0, 2, 3), "don't exist"),
        (keys(0, 1, 2), keys(0, 2, 3), "don't exist"),
        (keys(1, 1, 0), keys(0, 2, 3), "ascend"),
        (keys(2, 1, 0), keys(0, 2, 3), "ascend"),
        (keys(0, 1), keys(0, 2, 2), "at least one"),
        (keys(0, 1), keys(0, 2), "every layer and head"),
        (keys(0, 1), keys(0, 1, 3), "every layer and head"),
    ],
)
def test_nonsense_is_refused(kept: np.ndarray, indptr: np.ndarray, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Selection(kept, indptr).check(COUNTS)
