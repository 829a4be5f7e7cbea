"""python -m benchmarks tiers and codecs: what loading KV saves, and what coding it costs."""

from pathlib import Path
from typing import Annotated

import typer

from midfill.cli.bench.options import JsonOption
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
    from benchmarks.tiers import measure_tiers, tier_table
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL
    from midfill.system.reporting.publish import publish

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


def codecs(
    model: ModelArgument = None,
    levels: Annotated[
        str | None,
        typer.Option(help="Options of CacheGen, separated by blanks, as in 'deep=16 deep=8'."),
    ] = None,
    texts: Annotated[int, typer.Option(min=1, help="Files, and texts with a needle.")] = 12,
    context: Annotated[int, typer.Option(min=64, help="Tokens whose KV is coded.")] = 1024,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure codecs of stored KV: bytes per token beside what they change in answers."""
    from benchmarks.codecs import DEFAULT_LEVELS, codec_table, measure_codecs
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL
    from midfill.system.reporting.publish import publish

    with show_steps("loading") as progress:
        report = measure_codecs(
            model or DEFAULT_MODEL,
            levels=tuple((levels or DEFAULT_LEVELS).split()),
            texts=texts,
            context=context,
            threads=threads,
            progress=progress,
        )
    table = codec_table(report)
    publish(report, table.drawn(), table.markdown(), section="codecs", json=json, docs=docs)
