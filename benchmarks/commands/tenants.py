"""python -m benchmarks tenants: what one tenant can tell of another by the time of answers."""

from typing import Annotated

import typer

from midfill.cli.bench.options import JsonOption, LoadedModelOption
from midfill.cli.options import ThreadsOption
from midfill.cli.outputs import DocsOption
from midfill.cli.progress import show_steps


def tenants(
    model: LoadedModelOption = None,
    trials: Annotated[int, typer.Option(min=10, help="Guesses of each kind.")] = 200,
    characters: Annotated[int, typer.Option(min=100, help="Of each document.")] = 1500,
    seed: Annotated[int, typer.Option(help="All chance follows from it.")] = 0,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure whether one tenant can tell by the time of an answer what another one has sent."""
    from midfill.system.extras import require

    require("python -m benchmarks tenants", ["httpx"], extra="bench")
    from benchmarks.tenants import measure_tenants, tenants_table
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL
    from midfill.system.reporting.publish import publish

    with show_steps("loading") as progress:
        report = measure_tenants(
            model or DEFAULT_MODEL,
            trials=trials,
            characters=characters,
            threads=threads,
            seed=seed,
            progress=progress,
        )
    table = tenants_table(report)
    publish(report, table.drawn(), table.markdown(), section="tenants", json=json, docs=docs)
