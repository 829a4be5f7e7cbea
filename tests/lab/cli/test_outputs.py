"""Files for results: what can't be written is refused before any work is done."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import make_app
from midfill.errors import MidfillError
from midfill_lab.cli.bench.app import app
from midfill_lab.cli.outputs import writable


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


def test_a_plot_needs_a_known_ending() -> None:
    benchmarks = make_app("tables")
    bitmap = CliRunner().invoke(benchmarks, ["tables", "peers", "a.json", "--plot", "a.bmp"])
    assert str(bitmap.exception) == "--plot a.bmp: the name must end in .png, .svg or .pdf"


def test_a_malformed_option_is_named() -> None:
    result = CliRunner().invoke(app, ["edits", "--fim-tokens", "<P>"])
    assert result.exit_code == 2
    assert "--fim-tokens" in result.output
