"""bench rounds --compare: two versions in interleaved pairs of runs."""

import json
import re
import shutil
from pathlib import Path

import msgspec
import pytest

from benchmarks.compare.ratios import MIN_PAIRS, versions_table
from benchmarks.compare.rounds import compare_rounds
from midfill.errors import MidfillError

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="compares commits")


def test_both_versions_run_in_turn_after_one_run_each_to_warm_up(
    package: Path, log: Path, temporary: Path
) -> None:
    compare_rounds([], "first", pairs=MIN_PAIRS, package=package)
    runs = [line.split() for line in log.read_text().splitlines()]
    names = [name for name, what, _ in runs if what == "runs"]
    assert names == ["old", "new", *["old", "new", "new", "old"] * (MIN_PAIRS // 2)]
    folders = {folder for _, _, folder in runs}
    assert len(folders) == 2
    assert all(Path(folder).is_relative_to(temporary) for folder in folders)
    assert list(temporary.iterdir()) == []


def test_shorter_times_are_faster_and_missing_ones_are_left_out(package: Path) -> None:
    report = compare_rounds(["--users", "1"], "first", pairs=MIN_PAIRS, package=package)
    assert {one.name: one.ratio for one in report.figures} == {
        "native": 2.0,
        "native, first TTFT": 2.0,
    }
    assert report.figures[1].unit == "ms"
    assert "| native, first TTFT | ms | 2000 | 1000 | 2.000 | 2.000 to 2.000 |" in (
        versions_table(report).markdown()
    )
    stored = json.loads(msgspec.json.encode(report))
    assert stored["pairs"] == MIN_PAIRS
    assert stored["arguments"] == ["--users", "1"]
    assert re.fullmatch("[0-9a-f]{40}", stored["old"]["commit"])


def test_a_version_that_fails_is_named_with_its_last_words(package: Path, temporary: Path) -> None:
    with pytest.raises(MidfillError, match=r"^old \(\w+\) failed with 1: no such option: --fail"):
        compare_rounds(["--fail"], "first", pairs=MIN_PAIRS, package=package)
    assert list(temporary.iterdir()) == []


def test_a_version_that_leaves_no_figures_is_named(package: Path) -> None:
    (package / "__main__.py").write_text("print('done')\n")
    with pytest.raises(MidfillError, match=r"^new \(\w+ with changes\) left no figures.*done"):
        compare_rounds([], "first", pairs=MIN_PAIRS, package=package)


def test_too_few_pairs_are_refused(package: Path) -> None:
    with pytest.raises(ValueError, match="5 pairs give no 95% interval, 6 do"):
        compare_rounds([], "first", pairs=5, package=package)
