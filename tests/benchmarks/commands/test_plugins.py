"""benchmarks plugins: which plugins, and what is written."""

from pathlib import Path

from typer.testing import CliRunner

from benchmarks.__main__ import app


def test_plugins_that_are_not_known_are_named(tiny_folder: Path) -> None:
    arguments = ["plugins", str(tiny_folder), "--only", "llama.vim", "--only", "emacs"]
    error = CliRunner().invoke(app, arguments).exception
    assert str(error).startswith(
        "--only emacs: there are whole documents, midfill lsp, llama.vim, "
    )


def test_plugins_are_counted(tiny_folder: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs.md"
    options = "--only", "Zed", "--sessions", "1", "--rounds", "5", "--window", "600,200"
    result = CliRunner().invoke(app, ["plugins", str(tiny_folder), *options, "--docs", str(docs)])
    assert result.exit_code == 0, result.output
    assert "| Zed | 5 |" in docs.read_text()
