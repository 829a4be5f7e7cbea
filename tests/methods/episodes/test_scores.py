"""Scores of cached keys and what stays, as loops over single heads and rows say."""

import math

import numpy as np
import pytest
from fake_keys import CONFIG, DIM, GROUP, KV_HEADS, LAYERS, ArrayCells, fake_queries
from hypothesis import given
from hypothesis import strategies as st

from midfill.methods.episodes.scores import best_keys, cached_scores, layer_budgets, window_scores
from midfill.methods.evict.method import SequenceKeys

HEADS = LAYERS * KV_HEADS


def unequal_keys(seed: int = 0) -> tuple[SequenceKeys, list[np.ndarray]]:
    """Return keys whose heads hold 3 to 14 of them, and each head's own."""
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(200, DIM)).astype(np.float32)
    cells = [
        rng.choice(200, count, replace=False).astype(np.int32) for count in 3 + np.arange(HEADS)
    ]
    found = SequenceKeys(CONFIG, cells, ArrayCells(keys, keys))  # type: ignore[arg-type]
    return found, [keys[each] for each in cells]


def test_scores_are_those_of_a_loop_over_heads_rows_and_keys() -> None:
    keys, own = unequal_keys()
    queries = fake_queries(5)
    found = cached_scores(keys, queries)
    for head in range(HEADS):
        layer, kv_head = divmod(head, KV_HEADS)
        best = [0.0] * len(own[head])
        for row in range(5):
            for query_head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
                query = queries[layer, row, query_head]
                exponents = [math.exp(float(query @ key) * CONFIG.score_scale) for key in own[head]]
                weights = [exponent / sum(exponents) for exponent in exponents]
                best = [max(pair) for pair in zip(best, weights, strict=True)]
        np.testing.assert_allclose(found[head], best, rtol=1e-4)


def test_window_scores_let_a_row_see_the_keys_before_it_alone() -> None:
    keys, _ = unequal_keys()
    first, last = fake_queries(1, seed=2), fake_queries(1, seed=3)
    both = window_scores(keys, np.concatenate((first, last), axis=1))
    alone = window_scores(keys, last)
    assert all(len(each) == count for each, count in zip(both, keys.counts, strict=True))
    # The last key is seen by the last row alone; pooled, its neighbours have at least its score.
    assert (both[-1][-4:] >= alone[-1][-1] - 1e-6).all()


@given(seed=st.integers(0, 50), pooled=st.booleans(), always=st.integers(0, 2))
def test_as_many_keys_stay_as_the_budgets_say(seed: int, pooled: bool, always: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(3, 12, HEADS)
    scores = [rng.choice(6, count).astype(np.float32) for count in counts]
    budgets = rng.integers(3, 12, LAYERS)
    selection = best_keys(scores, budgets, always, pooled=pooled)
    selection.check(counts.astype(np.int32)) if always else None
    kept = np.split(selection.kept, selection.indptr[1:-1])
    for layer in range(LAYERS):
        heads = range(layer * KV_HEADS, (layer + 1) * KV_HEADS)
        sizes = [len(kept[head]) for head in heads]
        if pooled:
            assert sum(sizes) == min(budgets[layer] * KV_HEADS, sum(counts[heads]))
        else:
            assert sizes == [min(budgets[layer], counts[head]) for head in heads]
        everything = sorted(
            (number >= always, -float(scores[head][number]), head, number)
            for head in heads
            for number in range(counts[head])
        )
        if pooled:
            best = {pair[2:] for pair in everything[: budgets[layer] * KV_HEADS]}
            assert {(head, int(n)) for head in heads for n in kept[head]} == best
        for head in heads:
            assert set(range(always)) <= set(kept[head].tolist())
            own = [pair[3] for pair in everything if pair[2] == head]
            assert set(kept[head].tolist()) == set(own[: len(kept[head])])


@given(
    similarity=st.lists(st.floats(0, 1), min_size=1, max_size=12),
    mean=st.integers(1, 600),
    alpha=st.floats(0, 4),
)
def test_budgets_add_up_and_no_layer_has_less_than_a_quarter(
    similarity: list[float], mean: int, alpha: float
) -> None:
    budgets = layer_budgets(np.array(similarity), mean, alpha)
    layers = len(similarity)
    assert (budgets >= mean / 4).all()
    assert mean * layers - 2 * layers <= budgets.sum() <= mean * layers
    order = np.argsort(similarity)
    assert (np.diff(budgets[order]) <= 0).all()  # the more alike, the fewer


def test_above_the_quarter_budgets_are_as_unequal_as_the_paper_s() -> None:
    similarity = np.array([0.25, 0.5, 0.75, 0.375])
    weights = [(1 - (each - 0.25) / 0.5) ** 0.5 for each in similarity]
    paper = [max(1000, math.floor(4 * 4000 * each / sum(weights))) for each in weights]
    assert sum(paper) > 16_000  # a quarter for the last is more than it leaves
    found = layer_budgets(similarity, 4000, 0.5)
    assert found[2] == 1000
    assert 15_996 <= found.sum() <= 16_000
    ratios = [(found[n] - 1000) / (paper[n] - 1000) for n in (0, 1, 3)]
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-3)


@pytest.mark.parametrize(("similarity", "alpha"), [([0.3, 0.3, 0.3], 1.1), ([0.1, 0.5, 0.9], 0.0)])
def test_equal_layers_and_a_sharpness_of_0_give_equal_budgets(
    similarity: list[float], alpha: float
) -> None:
    assert layer_budgets(np.array(similarity), 77, alpha).tolist() == [77] * 3
