"""The command ``python -m benchmarks disaggregation``."""

from typing import Annotated

import typer

from midfill.cli.bench.options import JsonOption
from midfill.cli.outputs import DocsOption
from midfill.cli.progress import show_steps
from midfill.system.reporting.publish import publish

LoadedArgument = Annotated[
    str | None, typer.Argument(help="The model; the default model if not set.")
]


def disaggregation(
    model: LoadedArgument = None,
    requests: Annotated[int, typer.Option(min=2, help="Requests of each run.")] = 150,
    utilisation: Annotated[
        float, typer.Option(min=0.05, max=2.0, help="Of the prefill worker; the rate follows.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 0,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure a prefill and a decode worker beside DistServe's simulator and one engine."""
    from benchmarks.disaggregation.load import DisaggregationLoad
    from benchmarks.disaggregation.measure import measure_disaggregation
    from benchmarks.disaggregation.report import disaggregation_table
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL

    load = DisaggregationLoad(requests=requests, utilisation=utilisation, seed=seed)
    with show_steps("loading") as progress:
        report = measure_disaggregation(model or DEFAULT_MODEL, load, progress)
    table = disaggregation_table(report)
    section = "disaggregation"
    publish(report, table.drawn(), table.markdown(), section=section, json=json, docs=docs)
