"""Scores by which tokens are computed again, against loops; whole runs are in test_reuse."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.reuse_scores import (
    ScoredBlend,
    Sentinels,
    caret_distances,
    score_methods,
    score_names,
)

PRE, SUF, MID = SENTINELS = Sentinels(91, 92, 93)


def distances(tokens: list[int]) -> list[int]:
    return caret_distances(np.array(tokens, np.int32), SENTINELS).tolist()


def test_distances_are_counted_in_the_text_and_not_in_the_prompt() -> None:
    # The text is 1 2 3 4 5, the caret, 6 7 8.
    far = 11
    assert distances([PRE, 1, 2, 3, SUF, 6, 7, 8, MID, 4, 5]) == [
        far, 4, 3, 2, far, 0, 1, 2, far, 1, 0,
    ]  # fmt: skip
    assert distances([SUF, 6, 7, 8, PRE, 1, 2, 3, MID, 4, 5]) == [
        far, 0, 1, 2, far, 4, 3, 2, far, 1, 0,
    ]  # fmt: skip


def test_text_of_no_part_is_as_far_as_can_be() -> None:
    assert distances([5, 6, PRE, 1, 2, SUF, MID]) == [7, 7, 7, 1, 0, 7, 7]
    assert distances([5, 6]) == [2, 2]
    assert distances([SUF, 6, PRE, 1, 2]) == [5, 0, 5, 1, 0], "there may be no middle"


@given(st.lists(st.integers(0, 9), max_size=60), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_as_many_as_cacheblend_chooses_have_no_better_ones_beside_them(
    scores: list[int], ratio: float
) -> None:
    method = ScoredBlend(ratio)
    chosen = method.best(np.array(scores, np.float64)).tolist()
    assert len(chosen) == method.recomputed(len(scores))
    assert chosen == sorted(set(chosen))
    others = [score for number, score in enumerate(scores) if number not in chosen]
    assert not chosen or not others or min(scores[number] for number in chosen) >= max(others)


def test_each_score_is_compared_with_the_method_that_chooses_as_many() -> None:
    some = "cacheblend:ratio=0.3"
    names = score_names(["cacheblend:ratio=0", some, "kvshare"])
    assert names == dict.fromkeys(
        [f"{some} nearest", f"{some} attention", f"{some} deviation x attention"], some
    )
    methods = score_methods([some], SENTINELS)
    assert list(methods) == list(names)
    assert len(set(methods.values())) == 3, "their KV isn't shared"
    assert all(isinstance(one, ScoredBlend) and one.ratio == 0.3 for one in methods.values())
