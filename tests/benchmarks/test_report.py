"""What a benchmark found goes to the terminal, and where else it is wanted."""

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.report import publish
from midfill_lab.reporting import ResultTable


class Report(msgspec.Struct):
    """Figures."""

    seconds: float


def test_figures_as_json_and_tables_in_a_section_of_a_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, page = tmp_path / "speed.json", tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- speed -->\nold\n<!-- /speed -->\n\nrest\n")
    tables = [ResultTable(rows=[{"tokens/s": text}], labels=0) for text in ("31", "47")]
    publish(Report(1.5), *tables, section="speed", json=figures, docs=page)
    assert json.loads(figures.read_text()) == {"seconds": 1.5}
    both = "\n\n".join(f"| tokens/s |\n| --- |\n| {text} |" for text in ("31", "47"))
    assert page.read_text() == f"# Page\n\n<!-- speed -->\n{both}\n<!-- /speed -->\n\nrest\n"
    out = capsys.readouterr().out
    assert "31" in out
    assert "47" in out
