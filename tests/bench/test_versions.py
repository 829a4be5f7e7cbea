"""bench speed/rounds --compare: two versions in interleaved pairs, and the ratio of their figures.

The versions are tiny stand-ins in a git repository: a package ``midfill`` that writes figures
without measuring anything, and notes in a file when it was run.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from midfill.bench.versions import MIN_PAIRS, compare_versions, estimate_ratio, versions_table
from midfill.errors import MidfillError

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="compares commits")

STAND_IN = """
import json, os, sys
arguments = sys.argv[1:]
with open(os.environ["STAND_IN_LOG"], "a") as log:
    log.write("NAME " + os.path.dirname(__file__) + "\\n")
if "--fail" in arguments and "NAME" == "old":
    sys.exit("no such option: --fail")
figures = {"speed": SPEED, "rounds": ROUNDS}[arguments[1]]
with open(arguments[arguments.index("--json") + 1], "w") as file:
    json.dump(figures, file)
"""


def git(repository: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    command = ["git", *identity, *arguments]
    subprocess.run(command, cwd=repository, check=True, capture_output=True)


def write_version(repository: Path, name: str, scale: float) -> Path:
    """A stand-in whose rates are ``scale`` times those of the first one; returns the package."""
    package = repository / "src" / "midfill"
    package.mkdir(parents=True, exist_ok=True)
    rate = {"tokens_per_second": 100.0 * scale}
    speed = {"prefill": {"512": rate}, "decode": {"16": rate}}
    times = {"first_ttft_seconds": 2.0 / scale, "later_ttft_seconds": 0.0}
    rounds = {"layouts": {"native": {"requests_per_second": 4.0 * scale, **times}}}
    source = STAND_IN.replace("NAME", name)
    source = source.replace("SPEED", repr(speed)).replace("ROUNDS", repr(rounds))
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(source)
    return package


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one commit, tagged ``first``, and a working tree twice as fast."""
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "temporary").mkdir()
    repository = tmp_path / "repository"
    repository.mkdir()
    git(repository, "init", "-q")
    write_version(repository, "old", 1.0)
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "first")
    git(repository, "tag", "first")
    return write_version(repository, "new", 2.0)


def test_both_versions_run_in_turn_after_one_run_each_to_warm_up(
    package: Path, tmp_path: Path
) -> None:
    compare_versions("speed", [], "first", pairs=MIN_PAIRS, package=package)
    order = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert order == ["old", "new", *["old", "new", "new", "old"] * (MIN_PAIRS // 2)]


def test_each_version_runs_from_a_copy_of_its_source_that_is_removed(
    package: Path, tmp_path: Path
) -> None:
    compare_versions("speed", [], "first", pairs=MIN_PAIRS, package=package)
    folders = {line.split()[1] for line in (tmp_path / "log").read_text().splitlines()}
    assert len(folders) == 2
    assert all(Path(folder).is_relative_to(tmp_path / "temporary") for folder in folders)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_figures_of_speed(package: Path) -> None:
    report = compare_versions("speed", [], "first", pairs=MIN_PAIRS, package=package)
    assert [one.name for one in report.figures] == ["prefill of 512 tokens", "decode at 16 tokens"]
    for one in report.figures:
        assert one.old == [100.0] * MIN_PAIRS
        assert one.new == [200.0] * MIN_PAIRS
        assert (one.ratio, one.low, one.high) == (2.0, 2.0, 2.0)
    assert not report.old.modified
    assert report.new.modified


def test_shorter_times_of_rounds_are_faster_and_missing_ones_are_left_out(package: Path) -> None:
    report = compare_versions("rounds", [], "first", pairs=MIN_PAIRS, package=package)
    assert {one.name: one.ratio for one in report.figures} == {
        "native": 2.0,
        "native, first TTFT": 2.0,
    }
    assert report.figures[1].unit == "ms"
    assert "| native, first TTFT | ms | 2000 | 1000 | 2.000 | 2.000 to 2.000 |" in (
        versions_table(report).markdown()
    )


def test_a_version_that_fails_is_named_with_its_last_words(package: Path, tmp_path: Path) -> None:
    with pytest.raises(MidfillError, match=r"^old \(\w+\) failed with 1: no such option: --fail"):
        compare_versions("speed", ["--fail"], "first", pairs=MIN_PAIRS, package=package)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_version_that_leaves_no_figures_is_named(package: Path) -> None:
    (package / "__main__.py").write_text("print('done')\n")
    with pytest.raises(MidfillError, match=r"^new \(\w+ with changes\) left no figures.*done"):
        compare_versions("speed", [], "first", pairs=MIN_PAIRS, package=package)


@pytest.mark.parametrize("commit", ["nothing", "--all", "first:src"])
def test_a_commit_that_is_none(package: Path, commit: str) -> None:
    with pytest.raises(MidfillError, match=f"has no commit '{re.escape(commit)}'"):
        compare_versions("speed", [], commit, pairs=MIN_PAIRS, package=package)


def test_a_commit_without_the_package(package: Path) -> None:
    repository = package.parents[1]
    git(repository, "rm", "-rq", "--cached", "src")
    git(repository, "commit", "-q", "--allow-empty", "-m", "no source")
    git(repository, "tag", "empty")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "again")
    with pytest.raises(MidfillError, match="has no folder src"):
        compare_versions("speed", [], "empty", pairs=MIN_PAIRS, package=package)


def test_a_package_outside_a_git_checkout(package: Path, tmp_path: Path) -> None:
    installed = tmp_path / "site-packages" / "midfill"
    shutil.copytree(package, installed)
    with pytest.raises(MidfillError, match="needs midfill to run from a git checkout"):
        compare_versions("speed", [], "first", pairs=MIN_PAIRS, package=installed)
    untracked = package.parents[1] / ".venv" / "midfill"
    shutil.copytree(package, untracked)
    with pytest.raises(MidfillError, match="needs midfill to run from a git checkout"):
        compare_versions("speed", [], "first", pairs=MIN_PAIRS, package=untracked)


def test_a_repository_gains_nothing(package: Path) -> None:
    def state() -> str:
        listed = ["git", "-C", str(package), "status", "--porcelain", "--ignored"]
        trees = ["git", "-C", str(package), "worktree", "list"]
        return "".join(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for command in (listed, trees)
        )

    before = state()
    compare_versions("speed", [], "first", pairs=MIN_PAIRS, package=package)
    assert state() == before


def test_the_interval_is_the_sign_tests() -> None:
    # Of 6 pairs the whole range, of 12 the third from each end: P(at most 2 of 12 heads) = 1.9%.
    assert estimate_ratio([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (3.5, 1.0, 6.0)
    assert estimate_ratio([float(n) for n in range(12, 0, -1)]) == (6.5, 3.0, 10.0)


def test_too_few_pairs_are_refused(package: Path) -> None:
    with pytest.raises(ValueError, match="5 pairs give no 95% interval, 6 do"):
        compare_versions("speed", [], "first", pairs=5, package=package)


def test_figures_can_be_stored(package: Path) -> None:
    report = compare_versions("speed", ["--repeats", "1"], "first", pairs=6, package=package)
    stored = json.loads(msgspec.json.encode(report))
    assert stored["pairs"] == 6
    assert stored["arguments"] == ["--repeats", "1"]
    assert re.fullmatch("[0-9a-f]{40}", stored["old"]["commit"])
