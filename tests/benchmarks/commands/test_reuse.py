"""bench reuse: what its options mean, and what is refused before a model is loaded."""

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.reuse import measure
from benchmarks.reuse.results import ReuseOptions
from midfill.errors import MidfillError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[ReuseOptions]:
    """Runs that are requested; none begins."""
    calls: list[ReuseOptions] = []

    def run(model: str, options: ReuseOptions, **_: object) -> None:
        calls.append(options)
        raise MidfillError("not run")

    monkeypatch.setattr(measure, "measure_reuse", run)
    return calls


def error(*arguments: str) -> str:
    return str(CliRunner().invoke(app, ["reuse", *arguments]).exception)


def test_methods_and_windows_are_lists(calls: list[ReuseOptions]) -> None:
    assert error("--windows", "1/2, 3/4", "--methods", "cacheblend:ratio=0.1 cacheblend") == (
        "not run"
    )
    assert calls[0].windows == ["1/2", "3/4"]
    assert calls[0].methods == ["cacheblend:ratio=0.1", "cacheblend"]


def test_without_jumps_there_are_only_files(calls: list[ReuseOptions]) -> None:
    error("--jumps", "0", "--contexts", "3")
    assert (calls[0].jumps, calls[0].windows, calls[0].contexts) == (0, [], 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "cake"], "cake takes no KV from elsewhere, as cacheblend and ape do"),
        (["--methods", "cacheblend:ratio=2"], "cacheblend: ratio must be from 0 to 1, not 2"),
        (["--jumps", "0", "--contexts", "0"], "there is nothing to measure"),
    ],
)
def test_bad_options_are_one_clear_line(
    calls: list[ReuseOptions], arguments: list[str], message: str
) -> None:
    assert error(*arguments).startswith(message)
    assert not calls
