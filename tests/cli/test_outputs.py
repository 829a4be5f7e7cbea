"""Files for results: what can't be written is refused before any work is done."""

import importlib.util
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import make_app
from midfill.cli.bench.app import app
from midfill.cli.outputs import writable
from midfill.errors import MidfillError


def test_a_file_in_a_folder_that_is_there_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (None, tmp_path / "new.json", Path("new.json")):
        assert writable(path) == path


def test_what_cant_be_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MidfillError, match=r"there is no folder .*/missing$"):
        writable(tmp_path / "missing" / "a.json")
    with pytest.raises(MidfillError, match=r"can't be written: it is a folder$"):
        writable(tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        "rounds",
        "speed",
        "profile",
        "edits",
        "methods",
    ],
)
def test_no_benchmark_begins_without_a_place_for_its_figures(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--json", "missing/a.json"])
    assert isinstance(result.exception, MidfillError)
    assert str(result.exception) == "missing/a.json can't be written: there is no folder missing"


def test_a_plot_needs_a_known_ending_and_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmarks = make_app("tables")
    bitmap = CliRunner().invoke(benchmarks, ["tables", "peers", "a.json", "--plot", "a.bmp"])
    assert str(bitmap.exception) == "--plot a.bmp: the name must end in .png, .svg or .pdf"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    bare = CliRunner().invoke(benchmarks, ["tables", "rounds", "a.json", "--plot", "a.png"])
    assert str(bare.exception) == (
        "--plot needs matplotlib; install it with: pip install 'midfill[bench]'"
    )


@pytest.mark.parametrize("command", ["rounds", "edits", "peers"])
def test_what_talks_to_servers_says_when_httpx_is_missing(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, [command])
    assert isinstance(result.exception, MidfillError)
    assert str(result.exception) == (
        f"bench {command} needs httpx; install it with: pip install 'midfill[bench]'"
    )


def test_a_malformed_option_is_named() -> None:
    result = CliRunner().invoke(app, ["edits", "--fim-tokens", "<P>"])
    assert result.exit_code == 2
    assert "--fim-tokens" in result.output
