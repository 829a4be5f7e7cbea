"""python -m benchmarks cascade: the slots and time of prompts that are trimmed layer by layer."""

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


def cascade(
    model: ModelArgument = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, whose medians are shown.")] = 3,
    files: Annotated[int, typer.Option(min=1, help="Prompts whose next tokens are scored.")] = 4,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure CAKE's cascade beside its one-shot form: slots, time, and what answers see."""
    from benchmarks.cascade import cascade_table, measure_cascade
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL

    with show_steps("loading") as progress:
        report = measure_cascade(
            model or DEFAULT_MODEL,
            repeats=repeats,
            files=files,
            threads=threads,
            progress=progress,
        )
    table = cascade_table(report)
    publish(report, table.drawn(), table.markdown(), section="cascade", json=json, docs=docs)
