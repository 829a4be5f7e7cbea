"""benchmarks tables: what a command of midfill bench wrote goes into a page, and is drawn."""

from pathlib import Path

import msgspec
import pytest
from peer_reports import peers_report
from typer.testing import CliRunner

from benchmarks.__main__ import make_app
from midfill_lab.reporting import write_json


@pytest.fixture
def figures(tmp_path: Path) -> Path:
    """A file that ``midfill bench peers`` has written."""
    write_json(tmp_path / "peers.json", peers_report())
    return tmp_path / "peers.json"


def run(*arguments: str | Path) -> tuple[str, str]:
    """Return what a call prints, and the error that it ends with."""
    result = CliRunner().invoke(make_app("tables"), ["tables", *map(str, arguments)])
    return result.output, str(result.exception)


def test_tables_are_printed_as_markdown(figures: Path) -> None:
    output, _ = run("peers", figures)
    assert "| load | prompts | measured | best peer | llama.cpp |\n| --- |" in output
    assert "\nvllm was left out: pip install it." in output


def test_tables_replace_a_section_and_are_plotted(figures: Path, tmp_path: Path) -> None:
    page, plot = tmp_path / "page.md", tmp_path / "peers.svg"
    page.write_text("<!-- peers -->\nold\n<!-- /peers -->\n")
    run("peers", figures, "--docs", page, "--plot", plot)
    assert page.read_text().startswith("<!-- peers -->\n| load |")
    assert plot.read_text().lstrip().startswith("<?xml")
    run("peers", figures, "--docs", page, "--section", "peers-again")
    assert page.read_text().count("| load | prompts | measured | best peer | llama.cpp |") == 2


def test_what_can_not_be_shown_is_one_clear_line(figures: Path, tmp_path: Path) -> None:
    assert run("sped", figures)[1].startswith("there is no sped; there are ceiling, edits,")
    assert run("speed", figures, "--plot", tmp_path / "x.svg")[1] == (
        "--plot: there is no plot of speed"
    )
    assert "is no file of 'midfill bench speed'" in run("speed", figures)[1]
    assert "none.json can't be read: No such file" in run("peers", tmp_path / "none.json")[1]


def test_servers_whose_words_have_lines_stay_in_a_line(figures: Path) -> None:
    report = peers_report()
    failed = msgspec.structs.replace(report.servers[-1], error="it died\nof this")
    write_json(figures, msgspec.structs.replace(report, servers=[failed]))
    assert f"{failed.name} ended early: it died / of this." in run("peers", figures)[0]
