"""The plain form of the tree search: a loop's choice, its cost, and where it finds the best."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_tree_search import naive_choice

from midfill.runners.forward.page_selection import Search, chosen_keys, select_from_keys
from midfill.runners.forward.tree_search import TreeRule, search_blocks

DIM = 8
RULE = TreeRule(blocks=64, block=2, window=100, sinks=16)
LENGTHS = [600, 1000, 1023, 1024, 4097]
SEARCHES = [Search.CENTRES, Search.FIRSTS, Search.EVERY_KEY]


def whole_numbers(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """A query and keys whose products are exact, and often equal."""
    rng = np.random.default_rng(seed)
    query = rng.integers(-8, 9, DIM).astype(np.float32)
    return query, rng.integers(-8, 9, (count, DIM)).astype(np.float32)


def looped(query: np.ndarray, keys: np.ndarray, rule: TreeRule) -> list[int]:
    """The choice by loops over rounds, nodes and keys."""
    return naive_choice(query[None], keys, rule)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_choice_is_that_of_a_loop(length: int, search: Search) -> None:
    rule = TreeRule(blocks=64, block=2, window=100, sinks=16, search=search)
    query, keys = whole_numbers(length, length)
    assert select_from_keys(query, keys, rule).tolist() == looped(query, keys, rule)


@given(
    st.integers(0, 10_000), st.integers(1, 150), st.integers(0, 12), st.integers(1, 4),
    st.integers(1, 30), st.integers(0, 9), st.sampled_from(SEARCHES),
)  # fmt: skip
def test_so_it_is_for_all_shapes(
    seed: int, length: int, blocks: int, block: int, window: int, sinks: int, search: Search
) -> None:
    rule = TreeRule(blocks, block, window, sinks, search)
    query, keys = whole_numbers(seed, length)
    chosen = select_from_keys(query, keys, rule)
    assert chosen.tolist() == looped(query, keys, rule)
    read = chosen_keys(chosen, rule, length)
    assert read[:sinks].all()
    assert read[-window:].all()
    between = max(length - window - sinks, 0)
    if between <= blocks * block:
        assert read.all()
        return
    found = chosen[1:]
    assert len(np.unique(found)) == blocks
    assert (np.diff(found) > 0).all()
    assert found.min(initial=0) >= 0
    assert sinks + found.max(initial=0) * block < chosen[0], "no block lies in the window"
    assert read.sum() <= sinks + blocks * block + window
    assert read.sum() >= sinks + blocks * block + window - (block - 1)


@pytest.mark.parametrize(
    ("length", "dense"),
    [(50, True), (100, True), (116, True), (244, True), (245, False), (246, False)],
)
def test_a_search_begins_where_keys_are_more_than_it_chooses(length: int, dense: bool) -> None:
    """T < w, T = w, T = w + sinks, T = w + sinks + k, and one and two more."""
    query, keys = whole_numbers(length, length)
    chosen = select_from_keys(query, keys, RULE)
    assert (chosen[0] == 0) == dense
    assert chosen_keys(chosen, RULE, length).all() == dense


@pytest.mark.parametrize("search", SEARCHES)
def test_queries_search_together_by_the_best_of_them(search: Search) -> None:
    """One of many that asks for a key finds it."""
    rule = TreeRule(blocks=16, block=2, window=20, sinks=4, search=search)
    rng = np.random.default_rng(1)
    queries = rng.integers(-8, 9, (9, DIM)).astype(np.float32)
    keys = rng.integers(-8, 9, (300, DIM)).astype(np.float32)
    together = rule.choose_together(queries, keys).tolist()
    assert together == naive_choice(queries, keys, rule)
    assert together != looped(queries[0], keys, rule)
    asking, others = np.zeros((9, DIM), np.float32), np.zeros((300, DIM), np.float32)
    asking[5, 0], others[100:200, 0], others[140:160, 0] = 1.0, 0.5, 1.0
    found = rule.choose_together(asking, others)[1:].tolist()
    assert sum(68 <= block < 78 for block in found) >= 9


def test_later_rows_read_everything_from_the_window_on() -> None:
    query, keys = whole_numbers(0, 600)
    chosen = select_from_keys(query, keys, RULE)
    assert chosen_keys(chosen, RULE, 607)[500:].all()


class CountedScores:
    """Scores of blocks, which are asked for and counted."""

    def __init__(self, scores: np.ndarray) -> None:
        self.scores, self.count = scores, 0

    def __call__(self, blocks: np.ndarray) -> np.ndarray:
        self.count += len(blocks)
        found: np.ndarray = self.scores[blocks]
        return found


@pytest.mark.parametrize("kept", [1, 3, 256])
def test_scores_are_asked_for_as_often_as_the_paper_says(kept: int) -> None:
    """At most 2 * m * ceil(log2(n / m)), a share of the blocks that falls with their number."""
    shares = []
    for length in (2048, 8192, 32768):
        candidates = length // 2
        scores = CountedScores(np.random.default_rng(length).normal(size=candidates))
        found = search_blocks(scores, candidates, kept, centre=True)
        assert len(np.unique(found)) == kept
        assert 0 < scores.count <= 2 * kept * math.ceil(math.log2(candidates / kept))
        shares.append(scores.count / candidates)
    assert shares[0] > shares[1] > shares[2]


def recall(scores: np.ndarray, kept: int) -> float:
    """The share of the best blocks that a search finds."""
    found = search_blocks(CountedScores(scores), len(scores), kept, centre=True)
    return len(np.intersect1d(found, np.argsort(-scores)[:kept])) / kept


def test_the_best_are_found_where_neighbours_score_alike() -> None:
    """Nearly all of them where scores are smooth; few where they are white noise."""
    rng = np.random.default_rng(0)
    blocks, kept = 16_384, 128
    phases = rng.uniform(0, 2 * np.pi, 6)
    places = np.arange(blocks) / blocks
    waves = [np.cos(2 * np.pi * n * places + phase) for n, phase in enumerate(phases, 1)]
    assert recall(np.sum(waves, axis=0), kept) > 0.95
    noise = np.mean([recall(rng.normal(size=blocks), kept) for _ in range(8)])
    chance = kept / blocks
    print(f"\nrecall in white noise {noise:.3f}, at random {chance:.3f}")
    assert noise < 5 * chance


def test_representatives_differ() -> None:
    query, keys = whole_numbers(3, 1500)
    centre = select_from_keys(query, keys, RULE)
    first = select_from_keys(query, keys, TreeRule(64, 2, 100, 16, Search.FIRSTS))
    assert not np.array_equal(centre, first)
