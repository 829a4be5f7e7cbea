"""bench cascade: slots from the allocator, and answers beside the one-shot form."""

from pathlib import Path

import pytest

from benchmarks.cascade import BUDGETS, CascadeReport, cascade_table, measure_cascade


@pytest.fixture(scope="module")
def report(tiny_folder: Path) -> CascadeReport:
    return measure_cascade(
        str(tiny_folder), lengths=[300], repeats=1, files=1, following=8, threads=1
    )


def test_the_cascade_holds_its_bound_and_one_shot_the_whole_prompt(report: CascadeReport) -> None:
    assert [one.budget for one in report.cases] == list(BUDGETS)
    for one in report.cases:
        assert one.one_shot_peak >= one.tokens == 300
        assert one.held <= one.peak <= one.bound
        assert one.held < 300 * one.budget + 2


def test_both_keep_the_same(report: CascadeReport) -> None:
    for one in report.cases:
        assert one.divergence > 0
        assert one.between < one.divergence


def test_the_table_has_a_row_for_each_budget(report: CascadeReport) -> None:
    text = cascade_table(report).markdown()
    assert text.count("\n| 300 |") == len(BUDGETS)
