"""The ``midfill`` command of the distribution ``midfill-gateway``: what needs no engine."""

import sys

from midfill.cli import run
from midfill.cli.gateway import gateway
from midfill.cli.keys import app as keys
from midfill.cli.usage import root_app

app = root_app(
    "midfill's planner in front of other servers; the distribution midfill has an engine.",
    edition=" (gateway)",
)
app.command()(gateway)
app.add_typer(keys, name="keys")


def main() -> None:
    """Run the command line; an error becomes one line on standard error."""
    sys.exit(run(app))
