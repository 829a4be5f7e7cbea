"""The plain form of choosing pages: bounds, best pages, and what rows read under a choice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.runners.forward.page_selection import (
    PageRule,
    all_pages,
    choose_pages,
    chosen_keys,
    page_scores,
    select_from_keys,
)

DIM = 8


def looped(query: np.ndarray, keys: np.ndarray, rule: PageRule) -> list[int]:
    """The choice by loops over pages, parts of pages, channels and keys."""
    newest = (len(keys) - 1) // rule.page
    if newest + 1 <= rule.pages:
        return [0] + [-1] * (rule.pages - 1)
    scores = []
    for page in range(newest):
        best = -float("inf")
        for start in range(page * rule.page, (page + 1) * rule.page, rule.summary):
            total = 0.0
            for channel in range(keys.shape[1]):
                column = [float(keys[i, channel]) for i in range(start, start + rule.summary)]
                x = float(query[channel])
                total += max(x * min(column), x * max(column))
            best = max(best, total)
        scores.append(best)
    ranked = sorted(range(newest), key=lambda page: (-scores[page], page))
    return [newest, *sorted(ranked[: rule.pages - 1])]


@given(st.integers(0, 10_000), st.integers(1, 90), st.integers(2, 5), st.sampled_from([1, 2, 4, 8]))
def test_the_choice_is_that_of_a_loop(seed: int, count: int, pages: int, summary: int) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(count, DIM)).astype(np.float32)
    query = rng.normal(size=DIM).astype(np.float32)
    rule = PageRule(pages, page=8, summary=summary)
    assert select_from_keys(query, keys, rule).tolist() == looped(query, keys, rule)


@given(st.integers(0, 10_000), st.integers(1, 20))
def test_a_page_scores_at_least_what_any_of_its_keys_does(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    keys, query = rng.normal(size=(count, DIM)) * 10, rng.normal(size=DIM) * 10
    keys, query = keys.astype(np.float32), query.astype(np.float32)
    lows, highs = keys.min(axis=0, keepdims=True), keys.max(axis=0, keepdims=True)
    [bound] = page_scores(query, lows, highs)
    exact = keys @ query
    assert bound >= exact.max() - 1e-3 * np.abs(exact).max()
    np.testing.assert_allclose(page_scores(query, keys, keys), exact, rtol=1e-4, atol=1e-3)


@given(st.integers(0, 10_000), st.integers(1, 200), st.integers(0, 20))
def test_every_row_reads_its_newest_page_and_no_more_than_the_budget(
    seed: int, seen: int, later: int
) -> None:
    """Under an older choice a row reads all that came after it as well: never less than itself."""
    rng = np.random.default_rng(seed)
    rule = PageRule(4, page=8, summary=4)
    keys, query = rng.normal(size=(seen, DIM)), rng.normal(size=DIM)
    chosen = select_from_keys(query.astype(np.float32), keys.astype(np.float32), rule)
    listed = chosen_keys(chosen, rule, seen + later)
    newest = (seen - 1) // rule.page * rule.page
    assert listed[newest:].all()
    assert listed[:seen].sum() <= rule.pages * rule.page
    if seen > rule.pages * rule.page:
        assert listed[:seen].sum() == (rule.pages - 1) * rule.page + seen - newest
        assert len(np.unique(chosen)) == rule.pages
    else:
        assert listed.all()


def test_of_equal_pages_the_first_are_chosen() -> None:
    rule = PageRule(3, page=8, summary=4)
    assert choose_pages(np.zeros(9, np.float32), rule).tolist() == [9, 0, 1]
    assert choose_pages(np.array([0, 1, 1, 0, 1], np.float32), rule).tolist() == [5, 1, 2]


def test_the_budget_is_reached_on_the_boundary_of_a_page() -> None:
    rule = PageRule(3, page=8, summary=4)
    keys, query = np.zeros((40, DIM), np.float32), np.zeros(DIM, np.float32)
    assert select_from_keys(query, keys[:24], rule).tolist() == all_pages(rule).tolist()
    assert select_from_keys(query, keys[:25], rule).tolist() == [3, 0, 1]
    assert chosen_keys(all_pages(rule), rule, 24).all()
    assert (rule.newest(24), rule.newest(25)) == (2, 3)
    assert (rule.summaries(24), rule.summaries(25)) == (4, 6)


def recall(summary: int, seeds: range) -> float:
    """How often the page of a planted key is among 3 of 64, by summaries of so many keys."""
    rule, found = PageRule(4, page=64, summary=summary), 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        keys = rng.normal(size=(64 * 64 + 10, 64)).astype(np.float32)
        query = rng.normal(size=64).astype(np.float32)
        place = int(rng.integers(0, 60 * 64))
        keys[place] = query * np.float32(1.4)
        found += place // 64 in select_from_keys(query, keys, rule)[1:]
    return found / len(seeds)


def test_summaries_of_16_keys_find_a_planted_key_more_often_than_those_of_64() -> None:
    """And both more often than the most recent pages, which never hold it."""
    fine, coarse = recall(16, range(40)), recall(64, range(40))
    assert fine > coarse > 3 / 64


@pytest.mark.parametrize("seen", [1, 15, 64])
def test_short_texts_are_read_whole(seen: int) -> None:
    keys = np.random.default_rng(0).normal(size=(seen, DIM)).astype(np.float32)
    chosen = select_from_keys(keys[-1], keys, PageRule(4, page=16, summary=4))
    assert chosen.tolist() == [0, -1, -1, -1]
