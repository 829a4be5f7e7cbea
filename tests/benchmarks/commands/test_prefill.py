"""bench prefill: what its options mean, and what is refused before a model is loaded."""

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.prefill import run
from benchmarks.prefill.results import QUICK, PrefillOptions
from midfill.errors import MidfillError
from midfill.methods.registry import methods_of
from midfill.models.checkpoints.model_store import DEFAULT_MODEL

Call = tuple[str, list[str], PrefillOptions]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Runs that are requested; none begins."""
    calls: list[Call] = []

    def measure(model: str, methods: list[str], options: PrefillOptions, *_: object) -> None:
        calls.append((model, methods, options))
        raise MidfillError("not run")

    monkeypatch.setattr(run, "measure_prefill", measure)
    return calls


def error(*arguments: str) -> str:
    return str(CliRunner().invoke(app, ["prefill", *arguments]).exception)


def test_all_methods_of_sparse_prefill_on_the_default_model(calls: list[Call]) -> None:
    assert error() == error("--quick") == "not run"
    assert calls == [
        (DEFAULT_MODEL, list(methods_of("prefill")), PrefillOptions()),
        (DEFAULT_MODEL, list(methods_of("prefill")), QUICK),
    ]


def test_others_can_be_named(calls: list[Call]) -> None:
    error("--methods", "flexprefill:gamma=0.8,least=64,minference", "--model", "m",
          "--tokens", "3000", "--repeats", "2", "--threads", "4")  # fmt: skip
    ((model, methods, options),) = calls
    assert (model, methods) == ("m", ["flexprefill:gamma=0.8,least=64", "minference"])
    assert options == PrefillOptions(tokens=3000, repeats=2, threads=4)


def test_methods_of_another_kind_are_one_clear_line(calls: list[Call]) -> None:
    assert "did you mean 'flexprefill'" in error("--methods", "flexprefil")
    assert error("--methods", "cake") == (
        "--methods takes methods of sparse prefill (minference, flexprefill), not cake"
    )
    assert not calls
