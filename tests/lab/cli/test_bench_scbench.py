"""bench scbench: what its options mean, and what is refused before a model is loaded."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from midfill.errors import MidfillError
from midfill.methods.registry import METHODS
from midfill_lab.bench.methods.results import Variant
from midfill_lab.bench.scbench import measure as bench
from midfill_lab.bench.scbench.results import SCBenchOptions
from midfill_lab.bench.scbench.tasks import TASKS
from midfill_lab.cli.bench.app import app

Call = tuple[str, list[Variant], SCBenchOptions]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Runs that are requested; none begins."""
    calls: list[Call] = []

    def measure(model: str, variants: list[Variant], options: SCBenchOptions, **_: object) -> None:
        calls.append((model, variants, options))
        raise MidfillError("not run")

    monkeypatch.setattr(bench, "measure_scbench", measure)
    return calls


def error(*arguments: str) -> str:
    return str(CliRunner().invoke(app, ["scbench", *arguments]).exception)


def test_all_methods_and_tasks_are_measured_unless_some_are_named(calls: list[Call]) -> None:
    assert error() == "not run"
    error("--model", "gemma.gguf", "--length", "8000", "--length", "2000", "--tasks", "kv,mf",
        "--methods", "snapkv:window=16,ape", "--budgets", "0.5", "--turns", "2")  # fmt: skip
    (_, variants, every), (model, named, some) = calls
    assert {one.method for one in variants} == set(METHODS)
    assert every == SCBenchOptions(tasks=tuple(TASKS))
    assert model == "gemma.gguf"
    assert named == [
        Variant("snapkv:window=16,budget=0.5", "snapkv:window=16", 0.5),
        Variant("ape", "ape"),
    ]
    assert some == SCBenchOptions(tasks=("kv", "mf"), lengths=(2000, 8000), turns=2)


def test_bad_options_are_one_clear_line(calls: list[Call], tmp_path: Path) -> None:
    assert error("--tasks", "kw").startswith("there is no task 'kw'; there are kv,")
    assert "did you mean 'snapkv'" in error("--methods", "snapvk")
    assert error("--plot", "scbench.txt").endswith("the name must end in .png, .svg or .pdf")
    (tmp_path / "rows.jsonl").write_text("nothing\n")
    wrong = error("--results", str(tmp_path / "rows.jsonl"))
    assert "rows.jsonl, line 1: no result of bench scbench" in wrong
    assert not calls
