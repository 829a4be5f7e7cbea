"""The command ``midfill bench ceiling``."""

from typing import Annotated

import typer

from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.progress import show_steps
from midfill.cli.values import parse_counts
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption, PlotOption, SectionOption
from midfill_lab.reporting import publish_tables

PrefillOption = Annotated[str, typer.Option(help="Prompt lengths, separated by commas.")]
ContextsOption = Annotated[
    str, typer.Option(help="Tokens before the first decoded one, separated by commas.")
]
StreamsOption = Annotated[str, typer.Option(help="Answers decoded at once, separated by commas.")]
RoundsOption = Annotated[
    int, typer.Option(min=1, help="Measurements of each load, between those of the machine.")
]


def ceiling(
    model: ModelArgument = None,
    prefill: PrefillOption = "512,2000",
    contexts: ContextsOption = "16,500,2000",
    streams: StreamsOption = "1,4,16",
    rounds: RoundsOption = 6,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
    section: SectionOption = "ceiling",
    plot: PlotOption = None,
) -> None:
    """Bound prefill, decode and both at once by what the machine can do, beside what is reached.

    The bound of a step follows from the model's shapes: bytes of weights and KV that must be read,
    and operations, at the best rates of reading and arithmetic that the machine shows just before
    and just after each measurement.
    """
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL
    from midfill_lab.bench.ceiling.measure import measure_ceiling
    from midfill_lab.bench.ceiling.plot import plot_ceiling
    from midfill_lab.bench.ceiling.report import ceiling_tables
    from midfill_lab.bench.ceiling.results import CeilingOptions

    options = CeilingOptions(
        prefill=parse_counts(prefill),
        contexts=parse_counts(contexts),
        streams=parse_counts(streams),
        rounds=rounds,
    )
    with show_steps("loading") as progress:
        report = measure_ceiling(model or DEFAULT_MODEL, options, threads, progress)
    publish_tables(report, ceiling_tables(report), json=json, docs=docs, section=section)
    if plot is not None:
        plot_ceiling(report, plot)
