"""Selections: what is a valid one."""

import numpy as np
import pytest

from midfill.methods.evict.selection import AddedKeys, Selection


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


def added(listed: np.ndarray | None, replaced: np.ndarray | None, indptr: np.ndarray) -> Selection:
    vectors = np.ones((2, 8), np.float32)
    shared = AddedKeys(vectors, vectors, indptr, listed=listed, replaced=replaced)
    return Selection.of_heads([keys(3), keys(1)], shared)


def test_heads_may_list_one_added_key_together() -> None:
    selection = added(keys(0, 1, 0), keys(1, 2, 0), keys(0, 2, 3))
    selection.check(COUNTS)
    assert selection.added is not None
    assert selection.added.entries().tolist() == [0, 1, 0]
    alone = added(None, None, keys(0, 1, 2))
    alone.check(COUNTS)
    assert alone.added is not None
    assert alone.added.entries().tolist() == [0, 1]


@pytest.mark.parametrize(
    ("listed", "replaced", "indptr", "error"),
    [
        (keys(0, 2, 1), None, keys(0, 2, 3), "doesn't exist"),
        (keys(0, -1, 1), None, keys(0, 2, 3), "doesn't exist"),
        (keys(0, 0, 0), None, keys(0, 2, 3), "listed by a head"),
        (keys(0, 1), None, keys(0, 2, 3), "for every layer and head"),
        (None, None, keys(0, 2, 3), "for every layer and head"),
        (keys(0, 1, 0), keys(1, 2, 2), keys(0, 2, 3), "replace keys"),
        (keys(0, 1, 0), keys(1, 2), keys(0, 2, 3), "replace keys"),
        (keys(0, 1, 0), keys(1, -1, 0), keys(0, 2, 3), "replace keys"),
    ],
)
def test_added_keys_that_fit_nothing_are_refused(
    listed: np.ndarray | None, replaced: np.ndarray | None, indptr: np.ndarray, error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        added(listed, replaced, indptr).check(COUNTS)
