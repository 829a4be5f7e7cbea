"""Scores by which tokens are computed again, against loops; whole runs are in test_reuse."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.reuse_scores import ScoredBlend, score_methods, score_names
from midfill.methods.reuse.cacheblend import CacheBlend


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
    methods = score_methods([some])
    assert list(methods) == list(names)
    assert len(set(methods.values())) == 3, "their KV isn't shared"
    nearest, *scored = methods.values()
    assert nearest == CacheBlend(ratio=0.3, order="caret")
    assert all(isinstance(one, ScoredBlend) and one.ratio == 0.3 for one in scored)
