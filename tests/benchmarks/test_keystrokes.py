"""bench keystrokes: every kind of keystroke is timed, and drafts are judged by what they cost."""

from pathlib import Path

import pytest

from benchmarks.keystrokes import (
    CASES,
    DRAFTS,
    break_even,
    keystrokes_tables,
    measure_keystrokes,
)
from benchmarks.report import markdown


def test_all_cases_are_measured_and_shown(tiny_folder: Path) -> None:
    report = measure_keystrokes(str(tiny_folder), context=100, prompt=300, keystrokes=3, threads=1)
    assert [outcome.case for outcome in report.outcomes] == list(CASES)
    for outcome in report.outcomes:
        assert min(outcome.ttft) > 0
        assert (outcome.step > 0) == (outcome.case.beside != "nothing")
    assert tuple(report.drafts) == DRAFTS
    text = markdown(keystrokes_tables(report))
    assert "| a long prompt | first come, first served | 6 |" in text
    assert "| 16 |" in text


@pytest.mark.parametrize(
    ("drafted", "cost", "share"),
    [(1, 1.0, 0.0), (1, 1.5, 0.5), (4, 5.0, 1.0), (2, 1.75, 0.5), (3, 4.1, None)],
)
def test_a_draft_pays_where_it_yields_more_than_it_costs(
    drafted: int, cost: float, share: float | None
) -> None:
    found = break_even(drafted, cost)
    assert found == (share if share is None else pytest.approx(share, abs=1e-3))
