"""bench methods: what its options mean, and what is refused before a model is loaded."""

import pytest
from typer.testing import CliRunner

from midfill.errors import MidfillError
from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from midfill_lab.bench.methods import measure as bench
from midfill_lab.bench.methods.results import QUICK, MethodsOptions, Variant
from midfill_lab.cli.bench.app import app

Call = tuple[list[str], list[Variant], MethodsOptions]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Runs that are requested; none begins."""
    calls: list[Call] = []

    def measure(
        models: list[str], variants: list[Variant], options: MethodsOptions, **_: object
    ) -> None:
        calls.append((models, variants, options))
        raise MidfillError("not run")

    monkeypatch.setattr(bench, "measure_methods", measure)
    return calls


def error(*arguments: str) -> str:
    return str(CliRunner().invoke(app, ["methods", *arguments]).exception)


def test_all_methods_at_three_budgets_or_one_where_it_has_to_be_quick(calls: list[Call]) -> None:
    assert error() == error("--quick") == "not run"
    (models, variants, options), (_, few, quick) = calls
    assert models == [DEFAULT_MODEL]
    assert options == MethodsOptions()
    assert quick == QUICK
    assert {one.budget for one in variants if one.method == "cake"} == {0.5, 0.25, 0.125}
    assert {one.budget for one in few if one.method == "cake"} == {0.25}


def test_others_can_be_named(calls: list[Call]) -> None:
    error("--methods", "snapkv:window=16", "--budgets", "0.5", "--models", "a, b")
    ((models, variants, _),) = calls
    assert models == ["a", "b"]
    assert variants == [Variant("snapkv:window=16,budget=0.5", "snapkv:window=16", 0.5)]


def test_nulls_and_single_parts_are_asked_for(calls: list[Call]) -> None:
    error("--methods", "cake", "--budgets", "0.25", "--nulls", "--measure", "needles,code")
    few = ("--context", "1200", "--needles", "3", "--code-context", "700", "--quick")
    error("--methods", "cake", "--measure", "needles", *few)
    (_, variants, options), (_, _, quick) = calls
    assert [one.null for one in variants] == [
        "", "at random", "evenly", "plain score", "reversed score", "equal layers",
    ]  # fmt: skip
    assert {one.of for one in variants[1:]} == {"cake:budget=0.25"}
    assert (options.shared, options.holes, options.repeats) == (0, 0, 0)
    assert len(options.depths) * options.needles >= 40
    assert options.code == MethodsOptions().code
    assert (quick.code, quick.context, quick.needles) == (0, 1200, 3)
    assert (quick.code_context, quick.code_tokens) == (700, QUICK.code_tokens)


def test_bad_options_are_one_clear_line(calls: list[Call]) -> None:
    assert error("--resume") == "--resume continues what a file holds: name it with --json"
    assert "did you mean 'snapkv'" in error("--methods", "snapvk")
    assert error("--budgets", "half").startswith("--budgets takes shares below 1")
    assert error("--measure", "needle").startswith("--measure names needle; there are needles,")
    assert not calls
