"""midfill bench speed: prefill and decode of one request at a time."""

from typing import Annotated

import typer

from midfill.cli.bench.options import (
    CompareOption,
    JsonOption,
)
from midfill.cli.bench.versions import absolute_model, publish_versions
from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.outputs import DocsOption
from midfill.cli.progress import show_steps
from midfill.cli.values import parse_counts
from midfill.system.reporting.publish import publish

PrefillOption = Annotated[str, typer.Option(help="Prompt lengths, separated by commas.")]
ContextsOption = Annotated[
    str, typer.Option(help="Tokens before the first decoded one, separated by commas.")
]
StreamsOption = Annotated[
    int,
    typer.Option(
        min=1, help="With --compare: answers decoded at once, measured as well; 1 for none."
    ),
]
StreamContextsOption = Annotated[
    str, typer.Option(help="With --compare: like --contexts, where several are decoded.")
]
RepeatsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Runs of each, whose medians are shown; 5 if not set. With --compare: requests of"
        " each per version and restart; if not set, more of short prompts than of long ones.",
    ),
]
PairsOption = Annotated[
    int,
    typer.Option(
        min=6,
        help="With --compare: how often both versions are restarted; more give narrower intervals.",
    ),
]


def speed(
    model: ModelArgument = None,
    prefill: PrefillOption = "512,1500",
    contexts: ContextsOption = "16,1500",
    streams: StreamsOption = 16,
    stream_contexts: StreamContextsOption = "16,500",
    repeats: RepeatsOption = None,
    threads: ThreadsOption = None,
    compare: CompareOption = None,
    pairs: PairsOption = 15,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure prefill and decode speed of one request at a time, in this process."""
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL

    if compare is not None:
        from midfill.lab.bench.versions.speed import CompareSpeedOptions, compare_speed

        compared = CompareSpeedOptions(
            model=absolute_model(model or DEFAULT_MODEL),
            prefill=parse_counts(prefill),
            contexts=parse_counts(contexts),
            streams=streams,
            stream_contexts=parse_counts(stream_contexts),
            repeats=repeats,
            threads=threads,
        )
        with show_steps("copying both versions") as progress:
            versions = compare_speed(compared, compare, pairs=pairs, progress=progress)
        publish_versions(versions, json, docs)
        return
    from midfill.lab.bench.speed import SpeedOptions, measure_speed, speed_table

    options = SpeedOptions(
        prefill=parse_counts(prefill), contexts=parse_counts(contexts), repeats=repeats or 5
    )
    with show_steps("loading") as progress:
        report = measure_speed(model or DEFAULT_MODEL, options, threads, progress)
    table = speed_table(report)
    publish(report, table.drawn(), table.markdown(), section="speed", json=json, docs=docs)
