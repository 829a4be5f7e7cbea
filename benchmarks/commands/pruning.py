"""python -m benchmarks pruning: methods that drop rows between layers."""

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


def pruning(
    model: ModelArgument = None,
    tokens: Annotated[int, typer.Option(min=128, help="Of each prompt, about.")] = 4000,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each kind and depth.")] = 2,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure methods that drop rows of a prompt between layers: time, work, and answers."""
    from benchmarks.pruning import measure_pruning, pruning_table
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL

    with show_steps("loading") as progress:
        report = measure_pruning(
            model or DEFAULT_MODEL,
            tokens=tokens,
            repeats=repeats,
            threads=threads,
            progress=progress,
        )
    table = pruning_table(report)
    publish(report, table.drawn(), table.markdown(), section="pruning", json=json, docs=docs)
