"""``bench plugins``: its counts, its table, and what it can't do."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import make_app
from benchmarks.plugins.measure import (
    WHOLE,
    PluginsOptions,
    PluginsReport,
    measure_plugins,
    plugins_of,
    plugins_table,
)
from midfill.errors import MidfillError
from midfill.models.checkpoints.checkpoint import Checkpoint

OPTIONS = PluginsOptions(sessions=1, rounds=30, window=(1200, 400))


@pytest.fixture(scope="module")
def report(checkpoint: Checkpoint) -> PluginsReport:
    return measure_plugins(checkpoint, "tiny", OPTIONS)


def test_every_client_is_replayed(checkpoint: Checkpoint, report: PluginsReport) -> None:
    assert set(report.counts) == set(plugins_of(checkpoint))
    for counts in report.counts.values():
        assert 0 < counts.requests <= counts.computed_tokens < counts.prompt_tokens


def test_whole_documents_are_one_request_each(report: PluginsReport) -> None:
    assert report.counts[WHOLE].requests == OPTIONS.rounds
    assert report.counts["minuet-ai"].requests == 3 * OPTIONS.rounds


def test_the_table_compares_with_whole_documents(report: PluginsReport) -> None:
    text = plugins_table(report).markdown()
    assert "| whole documents | 30 |" in text
    assert text.count("| 1.00 |") >= 1
    assert "about 1200 characters before the caret and at most 400 after it" in text


def test_the_figures_are_the_same_again(checkpoint: Checkpoint, report: PluginsReport) -> None:
    again = measure_plugins(checkpoint, "tiny", OPTIONS, names=["llama.vim"])
    assert again.counts == {"llama.vim": report.counts["llama.vim"]}
    stored = msgspec.json.decode(msgspec.json.encode(report), type=PluginsReport)
    assert stored == report


def test_a_model_without_fim_tokens_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(MidfillError, match="not a special token"):
        measure_plugins(checkpoint, "tiny", OPTIONS, fim_tokens=("<a>", "<b>", "<c>"))


def test_plugins_that_are_not_known_are_named(tiny_folder: Path) -> None:
    arguments = ["plugins", str(tiny_folder), "--only", "llama.vim", "--only", "emacs"]
    error = CliRunner().invoke(make_app("plugins"), arguments).exception
    assert str(error).startswith(
        "--only emacs: there are whole documents, midfill lsp, llama.vim, "
    )


def test_plugins_are_counted(tiny_folder: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs.md"
    options = "--only", "Zed", "--sessions", "1", "--rounds", "5", "--window", "600,200"
    result = CliRunner().invoke(
        make_app("plugins"), ["plugins", str(tiny_folder), *options, "--docs", str(docs)]
    )
    assert result.exit_code == 0, result.output
    assert "| Zed | 5 |" in docs.read_text()
