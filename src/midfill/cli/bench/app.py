"""The ``midfill bench`` commands together."""

import typer

from midfill.cli.bench.blocks import blocks
from midfill.cli.bench.cascade import cascade
from midfill.cli.bench.disaggregation import disaggregation
from midfill.cli.bench.edits import edits, replay
from midfill.cli.bench.gateway import gateway, gateway_rounds
from midfill.cli.bench.keystrokes import keystrokes
from midfill.cli.bench.kv_dtypes import kv_dtypes
from midfill.cli.bench.methods import methods
from midfill.cli.bench.peers import peers
from midfill.cli.bench.plugins import plugins
from midfill.cli.bench.precision import precision
from midfill.cli.bench.prefill import prefill
from midfill.cli.bench.profile import profile
from midfill.cli.bench.pruning import pruning
from midfill.cli.bench.reliability import kills, overload, soak
from midfill.cli.bench.replicas import cluster_simulation, replicas
from midfill.cli.bench.reuse import reuse
from midfill.cli.bench.rounds import rounds
from midfill.cli.bench.schedulers import schedulers
from midfill.cli.bench.speed import speed
from midfill.cli.bench.stops import stops
from midfill.cli.bench.tenants import tenants
from midfill.cli.bench.tiers import codecs, tiers

app = typer.Typer(
    no_args_is_help=True,
    help="Measure speed; tables on the terminal, figures as JSON, plots and Markdown.",
)


@app.callback()
def _bench() -> None:
    """Measure speed."""


for _command in (
    rounds,
    speed,
    profile,
    keystrokes,
    schedulers,
    stops,
    cascade,
    pruning,
    precision,
    edits,
    replay,
    kills,
    overload,
    soak,
    peers,
    methods,
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
):
    app.command()(_command)
