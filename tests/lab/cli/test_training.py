"""``midfill train`` says what it needs before it loads anything."""

import importlib.util
from pathlib import Path

import pytest
from typer.testing import CliRunner

from midfill.errors import MidfillError
from midfill_lab.cli.training import app


@pytest.mark.parametrize(
    ("command", "missing", "problem"),
    [
        ("fim", "peft", "training needs peft;"),
        ("fim", "torch", "training needs torch;"),
        ("data", "torch", "midfill train data needs torch;"),
    ],
)
def test_missing_libraries_are_named(
    command: str, missing: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else object()
    )
    arguments = [command, str(tmp_path)]
    if command == "fim":
        arguments += ["--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, MidfillError), result.output
    assert str(result.exception) == f"{problem} install it with: pip install 'midfill[train]'"
