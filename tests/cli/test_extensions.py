"""Commands from other distributions join those of midfill; without the lab, its own say so."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest
import typer
from typer.testing import CliRunner

from midfill.cli import extensions
from midfill.errors import OptionError


def extended(monkeypatch: pytest.MonkeyPatch, *brought: EntryPoint) -> typer.Typer:
    """Return a command line with the commands that distributions bring."""
    monkeypatch.setattr(extensions, "entry_points", lambda group: EntryPoints(brought))
    app, methods = typer.Typer(), typer.Typer(invoke_without_command=True)
    methods.callback()(lambda: None)
    app.add_typer(methods, name="methods")
    extensions.add_extensions({"": app, "methods": methods})
    return app


@pytest.mark.parametrize(
    "arguments",
    [["bench"], ["eval", "infilling", "--limit", "3"], ["methods", "calibrate", "--help"]],
    ids=" ".join,
)
def test_a_command_of_the_lab_says_how_to_install_it(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = CliRunner().invoke(extended(monkeypatch), arguments)
    name = " ".join(arguments[:2] if arguments[0] == "methods" else arguments[:1])
    assert isinstance(result.exception, OptionError)
    assert str(result.exception) == (
        f"midfill {name} is in midfill-lab; install it with: pip install midfill-lab "
        "(in a source checkout: pip install -e lab)"
    )


def test_what_a_distribution_brings_is_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    brought = EntryPoint("methods.draw", "turtle:done", "midfill.commands")
    monkeypatch.setattr(EntryPoint, "load", lambda entry: lambda: typer.echo(entry.value))
    result = CliRunner().invoke(extended(monkeypatch, brought), ["methods", "draw"])
    assert result.output == "turtle:done\n"


def test_a_distribution_that_is_broken_spoils_no_other_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = extended(monkeypatch, EntryPoint("eval", "no_such_module:app", "midfill.commands"))
    assert CliRunner().invoke(app, ["--help"]).exit_code == 0
    result = CliRunner().invoke(app, ["eval", "infilling"])
    assert isinstance(result.exception, OptionError)
    assert str(result.exception) == (
        "midfill eval can't be loaded from no_such_module:app: No module named 'no_such_module'"
    )


def test_a_command_for_a_place_that_there_is_not_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brought = EntryPoint("serve.more", "turtle:done", "midfill.commands")
    result = CliRunner().invoke(extended(monkeypatch, brought), ["--help"])
    assert result.exit_code == 0
    assert "more" not in result.output
