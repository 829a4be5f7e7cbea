"""Texts and answers longer than the context are measured, where methods go that far."""

import pytest
from tiny_checkpoints import write_tiny

from benchmarks.beyond_context import (
    ANEW,
    FULL_KV,
    METHODS,
    BeyondContextReport,
    answers_table,
    measure_beyond_context,
    scores_table,
)

CONTEXT, LENGTH = 4096, 6144


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> BeyondContextReport:
    folder = write_tiny("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=CONTEXT)
    return measure_beyond_context(
        str(folder), budget=1024, length=LENGTH, texts=2, answer=4096, threads=1
    )


def test_methods_score_texts_beyond_the_context(report: BeyondContextReport) -> None:
    ranges = {each.method: len(each.scores) for each in report.texts}
    assert ranges == {FULL_KV: 2, ANEW: 3, **dict.fromkeys(METHODS, 3)}
    for each in report.texts:
        assert all(-12 < score < 0 for score in each.scores)
    # Up to twice the budget, all of them see everything.
    first = {each.scores[0] for each in report.texts if each.text == 0}
    assert max(first) - min(first) < 1e-3


def test_answers_hold_no_more_slots_however_long_they_are(report: BeyondContextReport) -> None:
    for each in report.answers:
        assert len(each.step_seconds) == len(each.slots) == 2
        assert max(each.slots) < 300


def test_the_tables_have_a_row_per_method(report: BeyondContextReport) -> None:
    scores, answers = scores_table(report), answers_table(report)
    assert [row["method"] for row in scores.rows] == [FULL_KV, ANEW, *METHODS]
    assert scores.rows[0]["4k to 6k"] == "-"
    assert [row["method"] for row in answers.rows] == [f"{each}:budget=256" for each in METHODS]
