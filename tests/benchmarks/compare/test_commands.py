"""benchmarks compare: both versions get the options of the benchmark."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import make_app
from benchmarks.compare import commands
from benchmarks.compare.speed import CompareSpeedOptions
from midfill.errors import MidfillError
from midfill.models.checkpoints.model_store import DEFAULT_MODEL

Calls = list[tuple[CompareSpeedOptions | list[str], str, int]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Comparisons that are requested; none is run."""
    calls: Calls = []

    def compare(
        options: CompareSpeedOptions | list[str], commit: str, *, pairs: int, progress: object
    ) -> None:
        calls.append((options, commit, pairs))
        raise MidfillError("not run")

    monkeypatch.setattr(commands, "compare_speed", compare)
    monkeypatch.setattr(commands, "compare_rounds", compare)
    return calls


def run(*arguments: str) -> str:
    """The error that a command ends with."""
    return str(CliRunner().invoke(make_app("compare"), ["compare", *arguments]).exception)


def test_options_of_speed_are_those_of_the_comparison(calls: Calls) -> None:
    run("speed", "HEAD")
    run("speed", "v1", "--model", "m", "--pairs", "20", "--prefill", "64", "--threads", "1")
    run("speed", "v1", "--model", "m", "--contexts", "9", "--repeats", "3")
    assert calls == [
        (CompareSpeedOptions(model=DEFAULT_MODEL), "HEAD", 15),
        (CompareSpeedOptions(model="m", prefill=(64,), threads=1), "v1", 20),
        (CompareSpeedOptions(model="m", contexts=(9,), repeats=3), "v1", 15),
    ]


def test_rounds_runs_are_short_unless_set(calls: Calls) -> None:
    run("rounds", "HEAD", "--layouts", "native", "--fim-tokens", "a,b,c")
    run("rounds", "HEAD", "--layouts", "native", "--users", "4", "--threads", "1")
    short = "--layouts native --seed 0 --users 2 --rounds 3 --output-tokens 16 --repeats 1"
    own = short.replace("--users 2", "--users 4")
    assert calls == [
        ([*short.split(), "--fim-tokens", "a,b,c"], "HEAD", 12),
        ([*own.split(), "--threads", "1"], "HEAD", 12),
    ]


def test_a_model_folder_is_found_from_everywhere(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    run("speed", "HEAD", "--model", "model")
    run("rounds", "HEAD", "--model", "model")
    found, arguments = calls[0][0], calls[1][0]
    assert isinstance(found, CompareSpeedOptions)
    assert found.model == str(tmp_path / "model")
    assert isinstance(arguments, list)
    assert arguments[-1] == str(tmp_path / "model")


@pytest.mark.parametrize("command", ["speed", "rounds"])
def test_fewer_than_six_pairs_are_refused(command: str, calls: Calls) -> None:
    result = CliRunner().invoke(make_app("compare"), ["compare", command, "HEAD", "--pairs", "5"])
    assert result.exit_code == 2
    assert calls == []
