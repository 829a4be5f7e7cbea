"""``midfill batch``: answer a file of requests, in this process."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midfill.cli.option_groups import FlagsOf, with_option_groups
from midfill.cli.options import ModelOption
from midfill.serving.options import ServeOptions

if TYPE_CHECKING:
    from midfill.serving.server.batch.job import BatchProgress
    from midfill.system.progress import NotedProgress


@with_option_groups
def batch(
    *,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.jsonl", help="Requests in OpenAI's batch format, one per line."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT.jsonl",
            help="Where results go, one per line as they arrive. Rows that have one there are"
            " left out.",
        ),
    ],
    model: ModelOption = None,
    served: Annotated[
        dict[str, Any],
        FlagsOf(
            ServeOptions, "served_name", "aliases", "fim_tokens", "window", "snippets", "options"
        ),
    ],
) -> None:
    """Answer a file of requests; started again after an interruption, it answers what is missing.

    Prompts that share a prefix are answered together, and as many at a time as there is memory for.
    Order and number never change an answer.
    """
    from midfill.engine.process.supervision import EngineProcess
    from midfill.system.process import ended_by_sigterm, ends_held_back

    with ended_by_sigterm(), ExitStack() as started:
        with ends_held_back():
            process = EngineProcess.spawn()  # loads its libraries meanwhile
            started.callback(process.discard)
        from msgspec import structs

        from midfill.cli.progress import show_progress
        from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
        from midfill.serving.server.offline_batch import run_batch

        model = model or DEFAULT_MODEL
        engine = served.pop("options")
        adapter = resolve_adapter(model, engine.adapter)
        engine = structs.replace(engine, adapter=None if adapter is None else str(adapter))
        options = ServeOptions(model=model, options=engine, **served)
        try:
            with show_progress() as progress:
                path = resolve(model, progress)
                report = partial(_report, progress)
                done = run_batch(options, path, source, output, progress, report, process)
        except KeyboardInterrupt:
            said = "interrupted; the same command goes on with what is missing"
            typer.echo(f"midfill: {said}", err=True)
            raise
    typer.echo(f"midfill: {summary(done)}; see {output}", err=True)


def _report(progress: "NotedProgress", batch: "BatchProgress") -> None:
    """Show how far a batch is."""
    progress(f"{batch.stage} rows", batch.done, batch.rows, progress_note(batch))


def progress_note(batch: "BatchProgress") -> str:
    """Return how far a batch is, how fast it goes and when it will end, in words."""
    parts = [f"{batch.done} of {batch.rows} rows"]
    if batch.failed:
        parts.append(f"{batch.failed} {'error' if batch.failed == 1 else 'errors'}")
    if batch.seconds_left is not None:
        parts.append(f"{batch.tokens_per_second:,.0f} tokens/s")
        parts.append(f"{duration(batch.seconds_left)} left")
    return ", ".join(parts)


def summary(batch: "BatchProgress") -> str:
    """Return what a run over a batch has done, in words."""
    parts = [f"{batch.done} of {batch.rows} rows have a result"]
    if batch.failed:
        parts.append(f"{batch.failed} of them {'an error' if batch.failed == 1 else 'errors'}")
    if batch.prompt_tokens:
        share = batch.cached_tokens / batch.prompt_tokens
        parts.append(f"{batch.prompt_tokens:,} prompt tokens ({share:.0%} of them shared)")
        parts.append(f"{batch.output_tokens:,} generated")
        parts.append(f"{batch.tokens_per_second:,.0f} tokens/s in {duration(batch.seconds)}")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Return a time in words, such as "40 s", "12 min" or "3 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
