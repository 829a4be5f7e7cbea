"""``python -m benchmarks``: the measurements that docs/ quotes, one command each."""

import sys

import typer

from benchmarks.commands.blocks import blocks
from benchmarks.commands.cascade import cascade
from benchmarks.commands.disaggregation import disaggregation
from benchmarks.commands.gateway import gateway, gateway_rounds
from benchmarks.commands.keystrokes import keystrokes
from benchmarks.commands.kv_dtypes import kv_dtypes
from benchmarks.commands.plugins import plugins
from benchmarks.commands.precision import precision
from benchmarks.commands.prefill import prefill
from benchmarks.commands.pruning import pruning
from benchmarks.commands.reliability import kills, overload, soak
from benchmarks.commands.replicas import cluster_simulation, replicas
from benchmarks.commands.reuse import reuse
from benchmarks.commands.schedulers import schedulers
from benchmarks.commands.stops import stops
from benchmarks.commands.tenants import tenants
from benchmarks.commands.tiers import codecs, tiers
from benchmarks.evaluation.commands import evaluation_page, held_out
from benchmarks.training.commands import train_plan
from midfill.cli import run
from midfill.cli.usage import CommandLine

app = typer.Typer(
    name="python -m benchmarks",
    cls=CommandLine,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure midfill for its documentation: tables on the terminal, figures as JSON, plots"
    " and Markdown. What you run on your own machine and model is in midfill bench.",
)


@app.callback()
def _benchmarks() -> None:
    """Measure midfill for its documentation."""


for _command in (
    keystrokes,
    schedulers,
    stops,
    cascade,
    pruning,
    precision,
    kills,
    overload,
    soak,
    prefill,
    plugins,
    gateway,
    gateway_rounds,
    disaggregation,
    blocks,
    replicas,
    cluster_simulation,
    reuse,
    tenants,
    tiers,
    codecs,
    kv_dtypes,
    evaluation_page,
    held_out,
    train_plan,
):
    app.command()(_command)


if __name__ == "__main__":
    sys.exit(run(app))
