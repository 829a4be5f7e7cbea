"""Estimators are fitted on one half of the files and tested on the other."""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from midfill.errors import MidfillError
from midfill.infill.confidence import Estimator, Features
from midfill_lab.evaluation.confidence import (
    JudgedCaret,
    calibration_error,
    fit,
    judge,
    least_threshold,
    most_confident,
    reliability_bins,
)
from midfill_lab.evaluation.evaluate import (
    InfillingReport,
    LineEvidence,
    Outcome,
    ProblemRecord,
    RunOptions,
)

TRUE = Estimator(intercept=1.5, joint=0.8, margin=0.3, entropy=-0.7, repeats=1.0)


def drawn(count: int, seed: int = 0) -> Iterator[LineEvidence]:
    """Answers that are right as often as ``TRUE`` says."""
    rng = random.Random(seed)
    for _ in range(count):
        features = Features(
            -rng.expovariate(0.4), rng.uniform(-1, 4), rng.uniform(0, 2), float(rng.random() < 0.2)
        )
        right = rng.random() < TRUE.probability(features)
        yield LineEvidence(right, 10, start=features, line=features)


def report_of(
    evidence: list[LineEvidence], suffixes: tuple[str, ...] = (".py",)
) -> InfillingReport:
    names = [f"file{n % 40}{suffixes[n % len(suffixes)]}" for n in range(len(evidence))]
    return InfillingReport(
        model="toy",
        options=RunOptions(tasks=("line",)),
        isolation="",
        problems=[ProblemRecord(str(n), "line", name, "0") for n, name in enumerate(names)],
        outcomes={
            "auto": [
                Outcome("x", True, {"exact": float(each.right)}, evidence=each) for each in evidence
            ]
        },
    )


def carets(*pairs: tuple[float, bool]) -> list[JudgedCaret]:
    return [
        JudgedCaret("line", ".py", "f", LineEvidence(right, 1), right, estimate, estimate, 0.5)
        for estimate, right in pairs
    ]


def whole(caret: JudgedCaret) -> float:
    return caret.whole


def test_what_was_drawn_from_an_estimator_gives_it_back() -> None:
    found = fit(list(drawn(8_000)), "line")
    for name in ("intercept", "joint", "margin", "entropy", "repeats"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), abs=0.2)


def test_too_few_right_answers_fit_nothing() -> None:
    wrong = [LineEvidence(False, 1, start=each.start, line=each.line) for each in drawn(100)]
    with pytest.raises(MidfillError, match=r"0 of 100 answers are right.*--limit"):
        fit(wrong, "line")


def test_estimates_are_those_of_the_other_half() -> None:
    result = judge(report_of(list(drawn(2000))), precision=70)
    assert calibration_error(result.carets, whole) < 0.05
    estimates = [caret.whole for caret in result.carets]
    truth = [
        TRUE.probability(caret.evidence.line) for caret in result.carets if caret.evidence.line
    ]
    assert np.abs(np.array(estimates) - truth).mean() < 0.05
    assert len({caret.threshold for caret in result.carets}) <= 2
    assert result.rule is not None
    shown = [each.evidence.right for each in result.carets if each.whole >= result.threshold]
    assert np.mean(shown) == pytest.approx(0.7, abs=0.06)


def test_estimates_of_a_server_are_its_own() -> None:
    evidence = [LineEvidence(number % 3 > 0, 5, estimate=(number % 3) / 3) for number in range(90)]
    result = judge(report_of(evidence), threshold=0.3)
    assert result.rule is None
    assert [caret.whole for caret in result.carets] == [each.estimate for each in evidence]
    shown = next(row for row in result.tables().tables[1].rows if row["language"] == "all")
    assert (shown["shown"], shown["exact"]) == ("66.7", "100.0")


def test_a_blank_answer_is_never_shown() -> None:
    blank = [LineEvidence(False, 0, start=each.start, line=each.line) for each in drawn(50, 1)]
    result = judge(report_of([*drawn(400), *blank]))
    assert all(caret.whole == 0.0 for caret in result.carets[400:])


def test_other_reports_are_refused() -> None:
    report = report_of([])
    with pytest.raises(MidfillError, match="not results of 'midfill eval confidence'"):
        judge(
            InfillingReport(
                model="", options=report.options, isolation="", problems=[], outcomes={"psm": []}
            )
        )


@pytest.mark.parametrize(
    ("precision", "threshold"), [(0.0, 0.1), (0.5, 0.1), (0.6, 0.5), (0.7, 0.9), (1.0, 0.9)]
)
def test_the_threshold_is_the_least_at_which_enough_is_right(
    precision: float, threshold: float
) -> None:
    estimates, right = [0.9, 0.7, 0.5, 0.1], [True, False, True, False]
    assert least_threshold(estimates, right, precision) == threshold


def test_where_nothing_is_right_nothing_is_shown() -> None:
    assert least_threshold([0.9, 0.2], [False, False], 0.5) == 1.0


def test_bins_have_equal_numbers_and_say_how_far_off_estimates_are() -> None:
    ranked = carets(*((number / 20, number >= 10) for number in range(20)))
    bins = list(reliability_bins(ranked, whole))
    assert [count for _, _, count in bins] == [2] * 10
    assert [rate for _, rate, _ in bins] == [0.0] * 5 + [1.0] * 5
    assert calibration_error(carets((0.5, True), (0.5, False)), whole) == 0.5
    assert [caret.whole for caret in most_confident(ranked, whole, 0.1)] == [0.95, 0.9]
