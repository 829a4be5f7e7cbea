"""The ``midfill`` command of the distribution ``midfill-gateway``: what needs no engine."""

import sys
from typing import Annotated

import typer

from midfill.cli.gateway import gateway
from midfill.cli.keys import app as keys
from midfill.cli.usage import CommandLine
from midfill.errors import MidfillError, OptionError
from midfill.version import __version__

app = typer.Typer(
    name="midfill",
    cls=CommandLine,
    help="midfill's planner in front of other servers; the distribution midfill has an engine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"midfill {__version__} (gateway)")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options of midfill itself."""


app.command()(gateway)
app.add_typer(keys, name="keys")


def main() -> None:
    """Run the command line; an error becomes one line on standard error."""
    try:
        app()
    except MidfillError as error:
        sys.stderr.write(f"midfill: {error}\n")
        sys.exit(2 if isinstance(error, OptionError) else 1)
