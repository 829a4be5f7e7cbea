"""bench speed/rounds --compare: both versions get the options of the benchmark."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from midfill.cli.bench.app import app
from midfill.errors import MidfillError
from midfill.lab.bench.versions import rounds, speed
from midfill.lab.bench.versions.speed import CompareSpeedOptions
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

    monkeypatch.setattr(speed, "compare_speed", compare)
    monkeypatch.setattr(rounds, "compare_rounds", compare)
    return calls


def run(*arguments: str) -> str:
    """The error that a command ends with."""
    return str(CliRunner().invoke(app, list(arguments)).exception)


def test_options_of_speed_are_those_of_the_comparison(calls: Calls) -> None:
    run("speed", "--compare", "HEAD")
    run("speed", "m", "--compare", "v1", "--pairs", "20", "--prefill", "64", "--threads", "1")
    run("speed", "m", "--compare", "v1", "--contexts", "9", "--repeats", "3")
    assert calls == [
        (CompareSpeedOptions(model=DEFAULT_MODEL), "HEAD", 15),
        (CompareSpeedOptions(model="m", prefill=(64,), threads=1), "v1", 20),
        (CompareSpeedOptions(model="m", contexts=(9,), repeats=3), "v1", 15),
    ]


def test_rounds_runs_are_short_unless_set(calls: Calls) -> None:
    run("rounds", "--compare", "HEAD", "--layouts", "native", "--fim-tokens", "a,b,c")
    run("rounds", "--compare", "HEAD", "--layouts", "native", "--users", "4", "--threads", "1")
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
    run("speed", "model", "--compare", "HEAD")
    run("rounds", "--model", "model", "--compare", "HEAD")
    found, arguments = calls[0][0], calls[1][0]
    assert isinstance(found, CompareSpeedOptions)
    assert found.model == str(tmp_path / "model")
    assert isinstance(arguments, list)
    assert arguments[-1] == str(tmp_path / "model")


def test_a_server_elsewhere_has_no_versions(calls: Calls) -> None:
    url = "http://127.0.0.1:1/v1"
    assert "takes no --url" in run("rounds", "--compare", "HEAD", "--url", url)
    assert calls == []


@pytest.mark.parametrize("command", ["speed", "rounds"])
def test_fewer_than_six_pairs_are_refused(command: str, calls: Calls) -> None:
    result = CliRunner().invoke(app, [command, "--compare", "HEAD", "--pairs", "5"])
    assert result.exit_code == 2
    assert calls == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "1.5b", "--model", "m"], "--shape makes a model of its own"),
        (["--resume"], "--resume continues what a file holds: name it with --json"),
        (["--vllm-dtypes", "int8"], "--vllm-dtypes names int8; there are float32, bfloat16"),
        (["--llama-formats", "a b"], "--llama-formats names 'a b'"),
        (["--shape", "9b"], "--shape names 9b; there are 1.5b"),
    ],
)
def test_options_of_peers_that_do_not_fit(arguments: list[str], message: str) -> None:
    assert message in run("peers", *arguments)
