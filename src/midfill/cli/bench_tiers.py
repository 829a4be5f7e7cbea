"""midfill bench tiers: what loading KV saves beside computing it."""

from pathlib import Path
from typing import Annotated

import typer

from midfill.cli.bench_options import JsonOption
from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.outputs import DocsOption
from midfill.cli.progress import show_steps
from midfill.cli.values import parse_counts


def tiers(
    model: ModelArgument = None,
    prompts: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, separated by commas.")
    ] = "512,1000,2000,4000,8000",
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each length.")] = 5,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where on disk to write; by default in midfill's cache folder."),
    ] = None,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure the warm tier: time to the first token of KV computed, loaded, or in the pool."""
    from midfill.bench.tiers import measure_tiers, tier_table
    from midfill.checkpoints.model_store import DEFAULT_MODEL
    from midfill.reporting.publish import publish

    lengths = parse_counts(prompts)
    with show_steps("loading") as progress:
        report = measure_tiers(
            model or DEFAULT_MODEL,
            lengths=lengths,
            repeats=repeats,
            threads=threads,
            folder=folder,
            progress=progress,
        )
    table = tier_table(report)
    publish(report, table.drawn(), table.markdown(), section="tiers", json=json, docs=docs)
