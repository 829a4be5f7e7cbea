"""Summaries: paired differences within a report and between two reports; their files."""

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from midfill.errors import MidfillError
from midfill_lab.evaluation.evaluate import InfillingReport, Outcome, ProblemRecord, RunOptions
from midfill_lab.evaluation.report import (
    comparison_tables,
    plot_report,
    read_report,
    report_tables,
    write_report,
)
from midfill_lab.evaluation.summary import (
    baseline_of,
    compare_reports,
    differences,
    estimate_difference,
    estimate_mean,
    estimate_share,
    summarise,
)


def report(conditions: dict[str, float], count: int = 300, seed: int = 0) -> InfillingReport:
    """Return a report whose conditions get these shares of the same holes exactly right."""
    chance = random.Random(seed)
    difficulty = [chance.random() for _ in range(count)]
    return InfillingReport(
        model="m",
        options=RunOptions(tasks=("line", "span")),
        isolation="",
        problems=[
            ProblemRecord(f"{i}", "line" if i % 2 else "span", f"{i // 3}", "digest")
            for i in range(count)
        ],
        outcomes={
            name: [
                Outcome("x", True, {"exact": float(hard < skill), "similarity": hard})
                for hard in difficulty
            ]
            for name, skill in conditions.items()
        },
    )


def test_differences_are_paired_and_from_psm() -> None:
    run = report({"prefix-only": 0.2, "psm": 0.5, "efim": 0.48})
    assert baseline_of(run) == "psm"
    assert baseline_of(report({"auto": 0.2, "efim": 0.2})) == "auto"
    scores = summarise(run, "line")
    assert scores["psm"]["exact"].count == 150
    found = differences(run, "line")
    assert set(found) == {"prefix-only", "efim"}
    efim = found["efim"]["exact"]
    assert efim.value == pytest.approx(scores["efim"]["exact"].value - scores["psm"]["exact"].value)
    assert -0.07 < efim.low <= efim.value <= efim.high <= 0
    assert found["prefix-only"]["exact"].high < -0.15


def test_two_reports_are_compared_hole_by_hole() -> None:
    base, trained = report({"prefix-only": 0.3, "psm": 0.3}), report({"psm": 0.6, "efim": 0.6})
    found = compare_reports(base, trained)
    assert set(found) == {"span", "line"}
    assert set(found["line"]) == {"psm"}
    exact = found["line"]["psm"]["exact"]
    assert exact.difference.value == pytest.approx(exact.second.value - exact.first.value)
    assert exact.difference.low > 0.15
    crossed = compare_reports(base, trained, [("prefix-only", "efim")])
    assert crossed["line"]["prefix-only / efim"]["exact"] == exact
    assert len(comparison_tables(crossed).drawn()) == 2


def test_only_shared_holes_are_compared() -> None:
    few, many = report({"psm": 0.3}, 90), report({"psm": 0.3}, 300)
    assert compare_reports(few, many)["line"]["psm"]["exact"].first.count == 45
    other = msgspec.structs.replace(
        few, problems=[ProblemRecord(f"x{i}", "line", "g", "d") for i in range(90)]
    )
    with pytest.raises(MidfillError, match="share no problem"):
        compare_reports(few, other)
    changed = msgspec.structs.replace(
        few, problems=[msgspec.structs.replace(p, digest="y") for p in few.problems]
    )
    with pytest.raises(MidfillError, match="problem 0 is another text in the second file"):
        compare_reports(few, changed)
    with pytest.raises(MidfillError, match="share no condition"):
        compare_reports(few, report({"auto": 0.1}))
    with pytest.raises(MidfillError, match="the second file has no condition 'efim', only psm"):
        compare_reports(few, many, [("psm", "efim")])


def test_reports_are_written_and_read(tmp_path: Path) -> None:
    run = report({"psm": 0.5, "efim": 0.4})
    for finished in (False, True):
        write_report(run, tmp_path / "a.json", finished=finished)
        assert read_report(tmp_path / "a.json") == run
    record = msgspec.json.decode((tmp_path / "a.json").read_bytes())
    assert record["summary"]["line"]["scores"]["psm"]["exact"]["count"] == 150
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    plot_report(run, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert len(report_tables(run).drawn()) == 4
    assert "| efim |" in report_tables(run).markdown()


def test_files_that_are_not_reports_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MidfillError, match="No such file"):
        read_report(tmp_path / "none.json")
    for content in ("", "{}", "[1]", '{"format": 1, "model": 3}'):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(MidfillError, match="is not a report of 'midfill eval infilling'"):
            read_report(tmp_path / "a.json")
    with pytest.raises(MidfillError, match="can't be written"):
        write_report(report({"psm": 0.5}), tmp_path / "a.json" / "b.json", finished=True)


def names(count: int, size: int = 1) -> list[str]:
    return [f"g{i // size}" for i in range(count)]


def test_the_mean_is_in_its_interval_and_the_seed_decides() -> None:
    values = [0.0, 1.0] * 50
    estimate = estimate_mean(values, names(100))
    assert estimate.value == 0.5
    assert estimate.count == 100
    assert 0.35 < estimate.low < 0.44 < 0.56 < estimate.high < 0.65  # 0.5 -+ 1.96 * 0.05
    assert estimate == estimate_mean(values, names(100))


def test_the_interval_of_equal_values_has_width_0() -> None:
    estimate = estimate_mean([1.0] * 10, names(10))
    assert (estimate.value, estimate.low, estimate.high) == (1.0, 1.0, 1.0)


def test_a_paired_difference_has_a_narrower_interval_than_a_mean() -> None:
    generator = np.random.default_rng(0)
    first = generator.random(200)
    second = first + 0.05 + generator.normal(0, 0.01, 200)
    difference = estimate_difference(first.tolist(), second.tolist(), names(200))
    assert 0.04 < difference.low < difference.value < difference.high < 0.06
    mean = estimate_mean(first.tolist(), names(200))
    assert difference.high - difference.low < 0.1 * (mean.high - mean.low)
    with pytest.raises(ValueError, match="paired"):
        estimate_difference([0.0], [0.0, 1.0], names(1))


def test_intervals_cover_the_true_mean_when_values_of_a_group_are_equal() -> None:
    generator = np.random.default_rng(1)
    covered = {"groups": 0, "alone": 0}
    for _ in range(100):
        values = np.repeat(generator.random(40) < 0.5, 10).astype(float).tolist()
        for how, groups in (("groups", names(400, 10)), ("alone", names(400))):
            estimate = estimate_mean(values, groups)
            covered[how] += estimate.low <= 0.5 <= estimate.high
    assert covered["groups"] >= 88  # 95 on average
    assert covered["alone"] <= 70  # what resampling single holes would claim


def test_a_share_of_everything_or_nothing_has_an_interval_too() -> None:
    groups = [f"{i}" for i in range(40)]
    every, none = estimate_share([True] * 40, groups), estimate_share([False] * 40, groups)
    # 40 independent draws are all right in 2.5% of all cases if each is with this chance.
    assert every.low**40 == pytest.approx(0.025)
    assert (every.value, every.high) == (1.0, 1.0)
    assert (none.low, none.high) == (0.0, 1 - every.low)
    two = estimate_share([True] * 40, ["a", "b"] * 20)
    assert two.low == pytest.approx(0.025**0.5), "groups count, not values"
    mixed = [i % 4 == 0 for i in range(40)]
    assert estimate_share(mixed, groups) == estimate_mean([float(v) for v in mixed], groups)
