"""The least increment is chosen on one half of the holes and shown on the other."""

import random
from itertools import pairwise

import pytest

from midfill.errors import MidfillError
from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.layout import PromptLayout
from midfill.models.checkpoints.model_record import MAX_LEAST_INCREMENT
from midfill_lab.evaluation.choice import check_score, half_of, split_in_halves
from midfill_lab.evaluation.conditions import PromptOptions, make_prompt
from midfill_lab.evaluation.cuts import (
    choose_cut,
    cut_conditions,
    parse_distance,
    parse_distances,
)
from midfill_lab.evaluation.evaluate import InfillingReport, Outcome, ProblemRecord, RunOptions
from midfill_lab.evaluation.problems import Problem

PRE, SUF, MID = (Sentinel(name, place) for place, name in enumerate(("<P>", "<S>", "<M>")))
FORMAT = FimFormat("test", PRE, SUF, MID, stop=(SUF,))
DISTANCES = (0, 32, 96, 200, 400, MAX_LEAST_INCREMENT)
LINES = "".join(f"value_{number} = {number}\n" for number in range(60))


def report(rises_to: dict[str, float], holes: int = 400, noise: float = 0.1) -> InfillingReport:
    """A report in which the mean similarity at each distance is as given."""
    rng = random.Random(0)
    base = [rng.gauss(0, 0.2) for _ in range(holes)]
    return InfillingReport(
        model="toy",
        options=RunOptions(tasks=("line",)),
        isolation="",
        problems=[ProblemRecord(f"line/{n}", "line", f"file {n % 50}", "0") for n in range(holes)],
        outcomes={
            name: [
                Outcome("", True, {"similarity": mean + own + rng.gauss(0, noise), "exact": 0.0})
                for own in base
            ]
            for name, mean in rises_to.items()
        },
    )


def test_the_least_distance_that_is_as_good_as_the_best_is_recommended() -> None:
    rising = {"0": 0.2, "96": 0.4, "200": 0.55, "400": 0.56, "whole": 0.56}
    choice = choose_cut(report(rising), margin=0.05).choice
    assert parse_distance(choice.recommended) == 200
    assert choice.best in ("200", "400", "whole")
    assert [result.condition for result in choice.choice] == ["0", "96", "200", "400", "whole"]
    assert abs(choice.on_other_holes.value) < 0.05


def test_without_certainty_the_best_itself_is_recommended() -> None:
    noisy = report({"0": 0.50, "400": 0.52}, holes=20, noise=0.4)
    choice = choose_cut(noisy, margin=0.001).choice
    assert choice.recommended == choice.best


def test_a_model_that_needs_the_whole_prefix_gets_it() -> None:
    chosen = choose_cut(report({"0": 0.2, "400": 0.3, "whole": 0.6}))
    assert parse_distance(chosen.choice.recommended) == MAX_LEAST_INCREMENT
    assert "Least increment: whole" in chosen.tables().markdown()


def test_the_other_half_has_no_part_in_the_choice() -> None:
    """What the second half says changes its own figures only."""
    flat = report({"0": 0.5, "400": 0.5})
    halves = split_in_halves([problem.group for problem in flat.problems], 0)
    skewed = report({"0": 0.5, "400": 0.5})
    for outcome, half in zip(skewed.outcomes["400"], halves, strict=True):
        outcome.scores["similarity"] += 0.4 * (half == "report")
    before, after = choose_cut(flat).choice, choose_cut(skewed).choice
    assert (after.recommended, after.best, after.choice) == (
        before.recommended,
        before.best,
        before.choice,
    )
    assert after.report != before.report


def test_holes_of_a_file_are_in_the_same_half() -> None:
    groups = [f"file {number % 31}" for number in range(400)]
    halves = split_in_halves(groups, seed=3)
    assert len({(group, half) for group, half in zip(groups, halves, strict=True)}) == 31
    assert 0.4 < halves.count("choice") / 400 < 0.6
    assert halves == split_in_halves(groups, seed=3)
    whole = report({"0": 0.5, "400": 0.5})
    parts = [half_of(whole, half) for half in ("choice", "report")]
    assert sum(len(part.problems) for part in parts) == 400
    assert all(len(part.problems) == len(part.outcomes["0"]) for part in parts)


def test_distances_are_cut_where_the_planner_cuts() -> None:
    problem = Problem(
        id="line/a.py:1", task="line", group="a.py", prefix=LINES + "x = va", hole="l", suffix="\n"
    )
    layouts = [
        make_prompt(condition, FORMAT, problem, PromptOptions())
        for condition in cut_conditions(DISTANCES, FORMAT)
    ]
    lengths = []
    for distance, layout in zip(DISTANCES, layouts, strict=True):
        assert isinstance(layout, PromptLayout)
        assert layout.planned_prefix == problem.prefix
        lengths.append(len(layout.text_of("increment")))
        assert lengths[-1] >= min(distance, len(problem.prefix))
        assert lengths[-1] < distance + 16
        assert layout.text_of("prefix").endswith("\n") or layout.cut == 0
    assert all(first < second for first, second in pairwise(lengths))
    assert lengths[-1] == len(problem.prefix)


def test_distances_are_parsed() -> None:
    assert parse_distances("400, 0,whole") == (0, 400, MAX_LEAST_INCREMENT)
    for wrong in ("", "400", "4,-1", "0,x", "1,2.5", "0,٣", "7,100000"):
        with pytest.raises(MidfillError, match="--distances"):
            parse_distances(wrong)


def test_models_whose_prompts_are_not_cut_are_refused() -> None:
    with pytest.raises(MidfillError, match="no FIM tokens"):
        cut_conditions(DISTANCES, None)
    suffix_first = FimFormat("codestral", PRE, SUF, None, order="spm")
    with pytest.raises(MidfillError, match="reads the suffix first"):
        cut_conditions(DISTANCES, suffix_first)


def test_a_score_that_is_not_measured_is_named() -> None:
    with pytest.raises(MidfillError, match="no such score"):
        check_score("beauty")
    with pytest.raises(MidfillError, match="they have exact, similarity"):
        choose_cut(report({"0": 0.5, "400": 0.5}), score="pass")


def test_other_reports_and_single_files_are_refused() -> None:
    with pytest.raises(MidfillError, match="'psm' is no distance"):
        choose_cut(report({"0": 0.5, "psm": 0.5}))
    with pytest.raises(MidfillError, match="one function or file"):
        choose_cut(report({"0": 0.5, "400": 0.5}, holes=1))


def test_what_is_noted_beside_a_model_is_plain_and_complete() -> None:
    measured = report({"0": 0.2, "200": 0.55, "400": 0.56})
    noted = choose_cut(measured).measurement()
    assert noted["holes"] == {"line": 400}
    assert noted["best"] in ("200", "400")
    minus = noted["minus_best_on_other_holes"]
    assert isinstance(minus, dict)
    assert minus["0"]["value"] < -0.3
