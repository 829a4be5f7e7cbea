"""Nulls of methods whose rows choose pages: as many pages, all of them in range and apart."""

import numpy as np
import pytest
from fake_keys import CONFIG

from midfill.methods.sparse_decode.method import ChosenPages
from midfill.runners.forward.page_selection import PageRule, Search
from midfill.runners.forward.tree_search import TreeRule
from midfill_lab.bench.methods.other_pages import (
    every_block_scored,
    random_pages,
    recent_pages,
    whole_page_summaries,
    whole_pages,
)

OWN = ChosenPages(PageRule(5, 64, 16), 4)


@pytest.mark.parametrize("make", [random_pages, recent_pages])
def test_as_many_pages_are_read_the_newest_among_them(make) -> None:  # type: ignore[no-untyped-def]
    method = make(OWN)
    assert method.page_choice is not None
    chosen = method.page_choice(CONFIG, OWN.selection_rule, 64 * 20 + 1)
    assert chosen.shape == (CONFIG.layers, CONFIG.query_heads, 5)
    assert (chosen[..., 0] == 20).all()
    assert (np.diff(chosen[..., 1:], axis=-1) > 0).all()
    assert chosen[..., 1:].min() >= 0
    assert chosen[..., 1:].max() < 20
    again = make(OWN).page_choice(CONFIG, OWN.selection_rule, 64 * 20 + 1)
    assert np.array_equal(chosen, again), "what is drawn follows from the position"


def test_recent_pages_are_the_last_and_random_ones_differ_by_head() -> None:
    recent, drawn = (
        make(OWN).page_choice(CONFIG, OWN.selection_rule, 64 * 20)  # type: ignore[misc]
        for make in (recent_pages, random_pages)
    )
    assert (recent == [19, 15, 16, 17, 18]).all()
    assert len(np.unique(drawn.reshape(-1, 5), axis=0)) > 1


def test_whole_pages_have_one_summary_each() -> None:
    assert whole_page_summaries(OWN) == ChosenPages(PageRule(5, 64, 64), 4)


@pytest.mark.parametrize("make", [random_pages, recent_pages])
def test_blocks_of_a_tree_search_lie_between_sinks_and_window(make) -> None:  # type: ignore[no-untyped-def]
    rule = TreeRule(4, block=2, window=10, sinks=3)
    method = make(ChosenPages(rule, 4, dense_layers=1))
    chosen = method.page_choice(CONFIG, rule, 100)
    assert chosen.shape == (CONFIG.layers, CONFIG.query_heads, 5)
    assert (chosen[..., 0] == 90).all()
    assert (np.diff(chosen[..., 1:], axis=-1) > 0).all()
    assert chosen[..., 1:].min() >= 0
    assert chosen[..., 1:].max() < rule.candidates(100) == 44


def test_a_tree_search_may_score_every_block_or_whole_pages_instead() -> None:
    """As many keys as before, rounded up to pages, of which there are at least two."""
    own = ChosenPages(TreeRule(128, block=2, window=128, sinks=16), 8, dense_layers=3)
    assert every_block_scored(own) == ChosenPages(
        TreeRule(128, 2, 128, 16, Search.EVERY_KEY), 8, dense_layers=3
    )
    assert whole_pages(own) == ChosenPages(PageRule(7, 64, 16), 8, dense_layers=3)
    few = ChosenPages(TreeRule(4, block=2, window=10, sinks=3), 4)
    assert whole_pages(few) == ChosenPages(PageRule(2, 64, 16), 4)
