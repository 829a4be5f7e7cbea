"""bench speed/rounds --compare: both versions get the options of the benchmark."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from midfill.bench import versions
from midfill.cli.bench import app
from midfill.errors import MidfillError

Calls = list[tuple[str, list[str], str, int]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Comparisons that are requested; none is run."""
    calls: Calls = []

    def compare(
        benchmark: str, arguments: Sequence[str], commit: str, *, pairs: int, progress: object
    ) -> None:
        calls.append((benchmark, list(arguments), commit, pairs))
        raise MidfillError("not run")

    monkeypatch.setattr(versions, "compare_versions", compare)
    return calls


def run(*arguments: str) -> str:
    """The error that a command ends with."""
    return str(CliRunner().invoke(app, list(arguments)).exception)


def test_speed_runs_are_short_unless_set(calls: Calls) -> None:
    pytest.importorskip("torch")
    run("speed", "--compare", "HEAD")
    run("speed", "m", "--compare", "v1", "--pairs", "20", "--prefill", "64", "--threads", "1")
    lengths = ["--prefill", "512,1500", "--contexts", "16,1500", "--repeats", "2"]
    assert calls[0] == ("speed", lengths, "HEAD", 12)
    own = ["m", "--prefill", "64", "--contexts", "16,1500", "--repeats", "2", "--threads", "1"]
    assert calls[1] == ("speed", own, "v1", 20)


def test_rounds_runs_are_short_unless_set(calls: Calls) -> None:
    run("rounds", "--compare", "HEAD", "--layouts", "native", "--fim-tokens", "a,b,c")
    short = "--layouts native --seed 0 --users 2 --rounds 3 --output-tokens 16 --repeats 1"
    assert calls == [("rounds", [*short.split(), "--fim-tokens", "a,b,c"], "HEAD", 12)]


def test_a_model_folder_is_found_from_everywhere(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    run("speed", "model", "--compare", "HEAD")
    run("rounds", "--model", "model", "--compare", "HEAD")
    assert calls[0][1][0] == str(tmp_path / "model")
    assert calls[1][1][-1] == str(tmp_path / "model")


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
