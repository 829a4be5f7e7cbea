"""Nulls of methods whose rows look sentences up: as many keys, chosen otherwise."""

import numpy as np
import pytest

from midfill.methods.sentences.method import ChosenSentences, EndTokens, FixedPages
from midfill.methods.sentences.selection import SentenceRule, chosen_keys
from midfill_lab.bench.methods.other_sentences import (
    fixed_pages,
    random_sentences,
    recent_sentences,
)

RULE = SentenceRule(budget=20, retained=100, start=3, recent=5)
OWN = ChosenSentences(RULE, EndTokens(np.zeros(9, bool)))
BOUNDS = np.tile(np.arange(0, 101, 4, dtype=np.int32), (6, 1))
SCORES = np.zeros((6, 25), np.float32)


@pytest.mark.parametrize("make", [random_sentences, recent_sentences])
def test_as_many_keys_are_read_and_what_is_drawn_follows_from_the_position(make) -> None:  # type: ignore[no-untyped-def]
    rank = make(OWN).rank
    chosen = chosen_keys(rank(SCORES, 7), BOUNDS, 100, RULE)
    assert (chosen.sum(axis=1) == 20).all()
    assert (rank(SCORES, 7) == make(OWN).rank(SCORES, 7)).all()


def test_recent_sentences_are_the_last_and_random_ones_differ_by_head_and_row() -> None:
    last, drawn = recent_sentences(OWN).rank, random_sentences(OWN).rank
    assert last is not None
    assert drawn is not None
    chosen = chosen_keys(last(SCORES, 7), BOUNDS, 100, RULE)
    assert chosen[:, 84:].sum() == 6 * 16, "of the last sentence, its first token is recent"
    assert len(np.unique(drawn(SCORES, 7), axis=0)) == 6
    assert (drawn(SCORES, 7) != drawn(SCORES, 8)).any()


def test_pages_end_at_multiples_of_16() -> None:
    assert fixed_pages(OWN) == ChosenSentences(RULE, FixedPages(16))
    assert np.flatnonzero(FixedPages(16)(np.zeros(20, np.int32), 30)).tolist() == [1, 17]
