"""Aligned tokens start at the same byte of the text in both tokenizations."""

from itertools import accumulate

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from midfill.lab.training.alignment import aligned_tokens, token_starts

LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=40)


@given(LENGTHS, LENGTHS, st.integers(0, 20))
def test_all_pairs_of_tokens_with_one_start_are_found(
    first: list[int], second: list[int], begin: int
) -> None:
    starts = [begin, *accumulate(first, initial=begin)][1:-1]
    others = [0, *accumulate(second)][:-1]
    naive = [(i, j) for i, a in enumerate(starts) for j, b in enumerate(others) if a == b]
    found = aligned_tokens(token_starts(first, begin), token_starts(second))
    assert [tuple(pair) for pair in found.tolist()] == naive
    assert found.dtype == np.int32


def test_no_tokens_have_no_pairs() -> None:
    assert aligned_tokens(token_starts([]), token_starts([1, 2])).shape == (0, 2)
