"""The ``midfill bench`` commands together."""

import typer

from midfill.cli.bench.edits import edits
from midfill.cli.bench.methods import methods
from midfill.cli.bench.peers import peers
from midfill.cli.bench.profile import profile
from midfill.cli.bench.rounds import rounds
from midfill.cli.bench.speed import speed

app = typer.Typer(
    no_args_is_help=True,
    help="Measure speed on this machine; tables on the terminal, figures as JSON.",
)


@app.callback()
def _bench() -> None:
    """Measure speed."""


for _command in (rounds, speed, profile, edits, peers, methods):
    app.command()(_command)
