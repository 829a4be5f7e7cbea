"""python -m benchmarks precision: what rounding costs."""

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


def precision(
    model: ModelArgument = None,
    tokens: Annotated[int, typer.Option(min=100, help="How many to compare, about.")] = 20_000,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure what rounding weights, activations and KV costs: divergence from float32 on code."""
    from benchmarks.precision import measure_precision, precision_table
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL

    with show_steps("loading") as progress:
        report = measure_precision(
            model or DEFAULT_MODEL, tokens=tokens, threads=threads, progress=progress
        )
    table = precision_table(report)
    publish(report, table.drawn(), table.markdown(), section="precision", json=json, docs=docs)
