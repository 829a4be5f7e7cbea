"""python -m benchmarks stops: what it costs to stop a prefill after each layer."""

from typing import TYPE_CHECKING, Annotated

import typer

from midfill.cli.bench.options import (
    JsonOption,
)
from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.outputs import DocsOption
from midfill.cli.progress import show_steps
from midfill.system.reporting.publish import publish

if TYPE_CHECKING:
    pass


def stops(
    model: ModelArgument = None,
    rows: Annotated[int, typer.Option(min=1, help="Of the prefill.")] = 1024,
    pairs: Annotated[int, typer.Option(min=6, help="Runs of each kind.")] = 40,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure what it costs a prefill to stop after each layer, as some methods have it do."""
    from benchmarks.stops import measure_stops, stops_table
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL

    with show_steps("loading") as progress:
        report = measure_stops(
            model or DEFAULT_MODEL, rows=rows, pairs=pairs, threads=threads, progress=progress
        )
    table = stops_table(report)
    publish(report, table.drawn(), table.markdown(), section="stops", json=json, docs=docs)
