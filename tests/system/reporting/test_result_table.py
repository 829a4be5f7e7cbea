"""Tables of results: on the terminal and in documents the same cells."""

import io

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType

from midfill.system.reporting.result_table import ResultTable

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


def test_numbers_can_be_aligned_in_a_document() -> None:
    lines = ResultTable(rows=ROWS, labels=2).markdown(numbers="---:").splitlines()
    assert lines[1] == "| --- | --- | ---: |"
    assert len(lines) == 4


def test_words_stand_left_and_numbers_right_on_the_terminal() -> None:
    table = ResultTable(rows=ROWS, labels=2, title="Tokens", caption="All of it.")
    title, *rows, caption = shown(table.drawn(box=SIMPLE_HEAD, title_justify="left"))
    assert title.strip() == "Tokens"
    assert caption.strip() == "All of it."
    assert [row.rstrip() for row in rows if "psm" in row or "efim" in row] == [
        "  psm      [bold]     1,234",
        "  efim     :heart:        7",
    ]
