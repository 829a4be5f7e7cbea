"""midfill bench speed: prefill and decode of one request at a time."""

from typing import Annotated

import typer

from midfill.cli.bench.options import JsonOption
from midfill.cli.options import BackendOption, DeviceOption, ModelArgument, ThreadsOption
from midfill.cli.progress import show_steps
from midfill.cli.values import parse_counts
from midfill.system.reporting import publish

PrefillOption = Annotated[str, typer.Option(help="Prompt lengths, separated by commas.")]
ContextsOption = Annotated[
    str, typer.Option(help="Tokens before the first decoded one, separated by commas.")
]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Runs of each, whose medians are shown.")]


def speed(
    model: ModelArgument = None,
    prefill: PrefillOption = "512,1500",
    contexts: ContextsOption = "16,1500",
    repeats: RepeatsOption = 5,
    backend: BackendOption = "auto",
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    json: JsonOption = None,
) -> None:
    """Measure prefill and decode speed of one request at a time, in this process."""
    from midfill.lab.bench.speed import SpeedOptions, measure_speed, speed_table
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL

    options = SpeedOptions(
        prefill=parse_counts(prefill), contexts=parse_counts(contexts), repeats=repeats
    )
    with show_steps("loading") as progress:
        report = measure_speed(
            model or DEFAULT_MODEL, options, threads, progress, backend=backend, device=device
        )
    publish(report, speed_table(report).drawn(), json)
