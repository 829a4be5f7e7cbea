"""What a benchmark found goes to the terminal, and where else it is wanted."""

import json
from pathlib import Path

import msgspec
import pytest

from midfill.system.reporting.publish import publish


class Report(msgspec.Struct):
    """Figures."""

    seconds: float
    layouts: dict[str, int]


REPORT = Report(1.5, {"psm": 3})


def test_the_terminal_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    publish(REPORT, "a table", "| a |", section="speed", json=None, docs=None)
    assert capsys.readouterr().out == "a table\n"
    assert list(tmp_path.iterdir()) == []


def test_figures_as_json_and_a_section_of_a_document(tmp_path: Path) -> None:
    figures, page = tmp_path / "speed.json", tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- speed -->\nold\n<!-- /speed -->\n\nrest\n")
    publish(REPORT, "a table", "| a |", section="speed", json=figures, docs=page)
    assert json.loads(figures.read_text()) == {"seconds": 1.5, "layouts": {"psm": 3}}
    assert page.read_text() == "# Page\n\n<!-- speed -->\n| a |\n<!-- /speed -->\n\nrest\n"
