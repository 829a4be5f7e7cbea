"""Tables of results: on the terminal and in documents the same cells."""

import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType

from midfill_lab.reporting import ResultTable, publish, replace_section

ROWS = [
    {"layout": "psm", "form": "[bold]", "tokens": "1,234"},
    {"layout": "efim", "form": ":heart:", "tokens": "7"},
]


def shown(renderable: RenderableType) -> list[str]:
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text().splitlines()


def test_a_document_gets_heads_rows_and_caption() -> None:
    assert ResultTable(rows=ROWS, title="unseen", caption="All of it.").markdown() == (
        "| layout | form | tokens |\n"
        "| --- | --- | --- |\n"
        "| psm | [bold] | 1,234 |\n"
        "| efim | :heart: | 7 |\n"
        "\n"
        "All of it."
    )


def test_a_document_shows_the_title_where_it_is_to() -> None:
    lines = ResultTable(rows=ROWS, labels=2, title="Tokens", titled=True).markdown().splitlines()
    assert lines[:3] == ["**Tokens**", "", "| layout | form | tokens |"]
    assert len(lines) == 6


def test_words_stand_left_and_numbers_right_on_the_terminal() -> None:
    table = ResultTable(rows=ROWS, labels=2, title="Tokens", caption="All of it.")
    title, *rows, caption = shown(table.drawn(box=SIMPLE_HEAD, title_justify="left"))
    assert title.strip() == "Tokens"
    assert caption.strip() == "All of it."
    assert [row.rstrip() for row in rows if "psm" in row or "efim" in row] == [
        "  psm      [bold]     1,234",
        "  efim     :heart:        7",
    ]


class Report(msgspec.Struct):
    """Figures."""

    seconds: float
    layouts: dict[str, int]


REPORT = Report(1.5, {"psm": 3})


def test_a_report_goes_to_the_terminal_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    publish(REPORT, "a table", None)
    assert capsys.readouterr().out == "a table\n"
    assert list(tmp_path.iterdir()) == []


def test_and_its_figures_into_a_file_where_one_is_named(tmp_path: Path) -> None:
    figures = tmp_path / "speed.json"
    publish(REPORT, "a table", figures)
    assert json.loads(figures.read_text()) == {"seconds": 1.5, "layouts": {"psm": 3}}


def test_a_section_of_a_document_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- speed -->\nold\n<!-- /speed -->\n\nrest\n")
    replace_section(page, "speed", "| a |")
    assert page.read_text() == "# Page\n\n<!-- speed -->\n| a |\n<!-- /speed -->\n\nrest\n"
