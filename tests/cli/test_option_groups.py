"""Groups of options as Typer sees them."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from midfill.cli.option_groups import with_option_groups


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option(min=1, help="How wide it is.")] = 3
    tall: Annotated[bool, typer.Option("--tall")] = False


@dataclass(frozen=True)
class Place:
    column: Annotated[int | None, typer.Option()] = None


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()

    @app.command()
    @with_option_groups
    def draw(
        *,
        name: Annotated[str, typer.Argument()],
        size: Size,
        colour: Annotated[str, typer.Option()] = "red",
        place: Place,
    ) -> None:
        """Draw a box."""
        typer.echo(f"{name} {size} {colour} {place}")

    return app


def test_a_group_has_the_values_of_its_options(app: typer.Typer) -> None:
    arguments = ["box", "--width", "5", "--tall", "--column", "2", "--colour", "blue"]
    result = CliRunner().invoke(app, arguments)
    assert result.output == f"box {Size(5, True)} blue {Place(2)}\n"


def test_options_that_are_not_given_have_the_defaults_of_the_group(app: typer.Typer) -> None:
    assert CliRunner().invoke(app, ["box"]).output == f"box {Size()} red {Place()}\n"


def test_help_and_checks_are_those_of_the_options(app: typer.Typer) -> None:
    shown = CliRunner().invoke(app, ["--help"]).output
    assert "Draw a box." in shown
    assert "How wide it is." in shown
    refused = CliRunner().invoke(app, ["box", "--width", "0"])
    assert refused.exit_code == 2
    assert "--width" in refused.output
