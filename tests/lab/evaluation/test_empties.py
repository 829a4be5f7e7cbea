"""The threshold of empty answers is chosen on one half of the carets and shown on the other."""

import random
from collections.abc import Sequence

import pytest

from midfill.errors import MidfillError
from midfill_lab.evaluation.choice import split_in_halves
from midfill_lab.evaluation.empties import (
    EMPTY_CONDITIONS,
    MIN_THRESHOLD,
    caret_results,
    caret_tasks,
    choose_empty,
    empty_conditions,
    given_empty,
    rates,
    separation,
    smallest_threshold,
)
from midfill_lab.evaluation.evaluate import InfillingReport, Outcome, ProblemRecord, RunOptions
from midfill_lab.evaluation.problems import EMPTY_TASKS, Task

TASKS: tuple[Task, ...] = ("missing-line", "nothing-end")


def report(
    missing: Sequence[float], nothing: Sequence[float], tasks: tuple[Task, ...] = TASKS
) -> InfillingReport:
    """A report of these probabilities.

    Answers are exact, and blank at every tenth caret. Without a threshold, they are empty where
    that has a probability above a half.
    """
    problems: list[ProblemRecord] = []
    outcomes: dict[str, list[Outcome]] = {condition.name: [] for condition in EMPTY_CONDITIONS}
    for task, probabilities in zip(tasks, (missing, nothing), strict=True):
        for number, probability in enumerate(probabilities):
            name = f"{task}/{number}"
            problems.append(ProblemRecord(name, task, f"file {number % 40}", "0"))
            blank = number % 10 == 0
            for condition, empty in (
                ("off", blank or probability > 0.5),
                ("never", blank),
                ("always", True),
            ):
                scores = {"empty": float(empty), "stops": 1.0}
                if task not in EMPTY_TASKS:
                    scores["exact"] = float(not empty)
                measured = {"off": None, "never": 1.0, "always": probability}[condition]
                outcomes[condition].append(
                    Outcome("" if empty else "x", True, scores, empty_probability=measured)
                )
    return InfillingReport(
        model="toy",
        options=RunOptions(tasks=tasks),
        isolation="",
        problems=problems,
        outcomes=outcomes,
    )


def drawn(count: int, middle: float, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [min(1.0, max(0.0, rng.gauss(middle, 0.1))) for _ in range(count)]


class TestTheRule:
    def test_no_more_than_the_limit_is_above_it(self) -> None:
        probabilities = [number / 100 for number in range(100)]
        for limit, expected in ((0.0, 0.99), (0.04, 0.95), (0.5, 0.49)):
            threshold = smallest_threshold(probabilities, limit)
            assert threshold == expected
            assert sum(one > threshold for one in probabilities) <= 100 * limit
            smaller = threshold - 0.01
            assert sum(one > smaller for one in probabilities) > 100 * limit

    def test_it_has_two_digits_rounded_up(self) -> None:
        assert smallest_threshold([0.1234, 0.5], 0.5) == 0.13
        assert smallest_threshold([0.0512, 0.5], 0.5) == 0.052
        assert smallest_threshold([0.52, 0.6], 0.5) == 0.52
        assert smallest_threshold([0.999, 1.0], 0.5) == 1.0

    def test_a_model_that_is_sure_is_not_overruled(self) -> None:
        assert smallest_threshold([1e-9, 0.0, 0.0, 0.3], 0.25) == MIN_THRESHOLD
        assert smallest_threshold([1e-9, 0.0, 0.0, 0.3], 1.0) == MIN_THRESHOLD


class TestTheChoice:
    def test_a_threshold_between_the_two_is_chosen(self) -> None:
        choice = choose_empty(report(drawn(400, 0.3), drawn(400, 0.7)))
        assert 0.3 < choice.threshold < 0.6
        found = rates(choice.reported_on, choice.threshold)
        assert found.nothing.value > 0.9
        # A tenth is blank without the threshold's doing.
        assert found.missing.value < 0.1 + 0.07
        assert found.nothing.count + found.missing.count == len(choice.reported_on)
        assert len(choice.chosen_on) + len(choice.reported_on) == 800

    def test_an_answer_that_is_blank_anyway_is_not_lost(self) -> None:
        # Every tenth answer is blank; only these have an empty answer above 0.2.
        missing = [0.9 if number % 10 == 0 else 0.2 for number in range(400)]
        choice = choose_empty(report(missing, drawn(400, 0.7)), limit=0.0)
        assert choice.threshold == 0.2

    def test_the_limit_moves_it(self) -> None:
        measured = report(drawn(400, 0.4), drawn(400, 0.6))
        thresholds = [choose_empty(measured, limit=limit).threshold for limit in (0, 0.04, 0.3)]
        assert thresholds == sorted(set(thresholds), reverse=True)

    def test_the_other_half_has_no_part_in_it(self) -> None:
        probabilities = drawn(400, 0.3)
        halves = split_in_halves([f"file {number % 40}" for number in range(400)], 0)
        skewed = [
            0.9 if half == "report" else one
            for one, half in zip(probabilities, halves, strict=True)
        ]
        nothing = drawn(400, 0.7)
        before = choose_empty(report(probabilities, nothing))
        after = choose_empty(report(skewed, nothing))
        assert before.threshold == after.threshold
        assert rates(after.reported_on, after.threshold).missing.value == 1.0

    def test_a_given_one_is_reported_on_all(self) -> None:
        choice = given_empty(report(drawn(40, 0.3), drawn(60, 0.7)), 0.5)
        assert (choice.threshold, choice.chosen_on, len(choice.reported_on)) == (0.5, [], 100)

    def test_both_kinds_are_needed(self) -> None:
        with pytest.raises(MidfillError, match="too few carets to choose from"):
            choose_empty(report([0.1], [0.9]))
        with pytest.raises(MidfillError, match="too few carets"):
            given_empty(report([0.1], []), 0.5)


def test_what_a_threshold_gives_is_put_together_from_two_answers() -> None:
    (blank, sure, unsure), (nothing,) = [
        caret_results(report([0.1, 0.7, 0.2], [0.6]))[part] for part in (slice(3), slice(3, 4))
    ]
    for result, threshold, empty, exact in (
        (blank, 0.5, 1.0, 0.0),  # what is left of its text is blank
        (sure, 0.5, 1.0, 0.0),
        (sure, 0.7, 0.0, 1.0),  # not above it
        (sure, 0.0, 1.0, 0.0),  # without a threshold
        (sure, 1.0, 0.0, 1.0),
        (unsure, 0.5, 0.0, 1.0),
        (unsure, 0.1, 1.0, 0.0),
    ):
        assert result.missing
        assert (result.score("empty", threshold), result.score("exact", threshold)) == (
            empty,
            exact,
        )
    assert not nothing.missing
    assert nothing.score("empty", 0.5) == 1.0


def test_how_well_the_probabilities_are_apart() -> None:
    assert separation(caret_results(report([0.1, 0.2], [0.3, 0.4]))) == 1.0
    assert separation(caret_results(report([0.1, 0.4], [0.3, 0.4]))) == pytest.approx(2.5 / 4)


def test_tables_show_both_kinds_before_and_after() -> None:
    tasks: tuple[Task, ...] = ("single-line", "nothing-blank")
    measured = report(drawn(400, 0.3), drawn(400, 0.7), tasks)
    choice = choose_empty(measured)
    page = choice.tables().markdown()
    own = f"{choice.threshold:g}"
    assert f"| empty, off | empty, {own} | exact, off | exact, {own} |" in page
    assert "| single-line | " in page
    assert "| nothing-blank | " in page
    assert f"| {own} (chosen) |" in page
    assert "| off |" in page
    assert f"Threshold: {own}, the smallest that loses at most 4% of " in page
    assert " carets that nothing was chosen on:" in page
    given = given_empty(measured, 0.15).tables().markdown()
    assert "| 0.15 (given) |" in given
    assert "chosen" not in given


def test_what_is_noted_beside_a_model_is_plain_and_complete() -> None:
    measured = report(drawn(400, 0.3), drawn(400, 0.7))
    noted = choose_empty(measured).measurement()
    assert noted["holes"] == {"missing-line": 400, "nothing-end": 400}
    assert noted["most_lost"] == 0.04
    found = noted["empty_on_other_holes"]
    assert isinstance(found, dict)
    assert found["with"]["nothing"]["value"] > 0.9
    assert noted["separation"] > 0.95  # type: ignore[operator]


def test_other_reports_and_models_are_refused() -> None:
    measured = report([0.1], [0.9])
    measured.outcomes["psm"] = measured.outcomes.pop("off")
    with pytest.raises(MidfillError, match="not results of 'midfill eval empty'"):
        choose_empty(measured)
    with pytest.raises(MidfillError, match="no FIM tokens"):
        empty_conditions(None)
    assert "single-line" in caret_tasks(humaneval=True)
    assert "single-line" not in caret_tasks(humaneval=False)
