"""python -m benchmarks schedulers: prefill by chunks and by layers."""

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


def schedulers(
    model: ModelArgument = None,
    prompt: Annotated[int, typer.Option(min=256, help="Tokens of the prompt.")] = 2000,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, whose medians are shown.")] = 7,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Compare prefill by chunks and by layers, beside running answers and alone."""
    from benchmarks.schedulers import measure_schedulers, scheduler_table
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL

    with show_steps("loading") as progress:
        report = measure_schedulers(
            model or DEFAULT_MODEL,
            prompt=prompt,
            repeats=repeats,
            threads=threads,
            progress=progress,
        )
    table = scheduler_table(report)
    publish(report, table.drawn(), table.markdown(), section="schedulers", json=json, docs=docs)
