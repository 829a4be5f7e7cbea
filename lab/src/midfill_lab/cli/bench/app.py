"""The ``midfill bench`` commands; those with many options of their own have files here."""

import asyncio
from typing import Annotated

import typer
from rich.console import Console, Group

from midfill.cli.options import (
    BackendOption,
    DeviceOption,
    MethodOption,
    ModelArgument,
    ThreadsOption,
)
from midfill.cli.progress import show_steps
from midfill.cli.values import parse_counts, parse_names
from midfill.errors import OptionError
from midfill_lab.cli.bench.batch import batch
from midfill_lab.cli.bench.ceiling import ceiling
from midfill_lab.cli.bench.methods import methods
from midfill_lab.cli.bench.options import (
    ClientFimTokensOption,
    JsonOption,
    LoadedModelOption,
    OutputTokensOption,
    UrlOption,
)
from midfill_lab.cli.bench.peers import peers
from midfill_lab.cli.bench.scbench import scbench
from midfill_lab.cli.bench.serving import serving
from midfill_lab.reporting import publish

app = typer.Typer(
    no_args_is_help=True,
    help="Measure speed on this machine; tables on the terminal, figures as JSON.",
)

LayoutsOption = Annotated[str, typer.Option(help="Layouts to measure, separated by commas.")]
UsersOption = Annotated[int, typer.Option(min=1, help="Documents edited at once.")]
RoundsOption = Annotated[int, typer.Option(min=1, max=7, help="Requests per user.")]
RepeatsOption = Annotated[
    int, typer.Option(min=1, help="Runs per layout, whose medians are shown.")
]
SeedOption = Annotated[int, typer.Option(help="Chooses the files.")]
PrefillOption = Annotated[str, typer.Option(help="Prompt lengths, separated by commas.")]
ContextsOption = Annotated[
    str, typer.Option(help="Tokens before the first decoded one, separated by commas.")
]


@app.callback()
def _bench() -> None:
    """Measure speed."""


@app.command()
def rounds(
    url: UrlOption = None,
    model: LoadedModelOption = None,
    layouts: LayoutsOption = "fim,efim,native",
    users: UsersOption = 4,
    rounds: RoundsOption = 5,
    output_tokens: OutputTokensOption = 16,
    repeats: RepeatsOption = 3,
    fim_tokens: ClientFimTokensOption = None,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    method: MethodOption = "none",
    json: JsonOption = None,
) -> None:
    """Measure EFIM's load: documents that grow at the caret, round after round.

    fim sends PRE prefix SUF suffix MID each time; efim keeps the first prefix in place and sends
    what grew after MID; native sends prefix and suffix and lets the server choose.
    """
    from midfill_lab.bench.clients import open_client
    from midfill_lab.bench.rounds import LAYOUTS, RoundsOptions, measure_rounds, rounds_table

    if url is not None and method != "none":
        raise OptionError("--method is for a model loaded here: start the server with its own")
    options = RoundsOptions(
        layouts=parse_names(layouts, LAYOUTS, "--layouts"),
        users=users,
        rounds=rounds,
        output_tokens=output_tokens,
        repeats=repeats,
        seed=seed,
        method=method,
    )
    console = Console(stderr=True)

    async def measure() -> None:
        async with open_client(url, model, fim_tokens, threads, console, method) as client:
            with show_steps("warming up") as progress:
                report = await measure_rounds(client, options, progress)
        publish(report, rounds_table(report).drawn(), json)

    asyncio.run(measure())


@app.command()
def speed(
    model: ModelArgument = None,
    prefill: PrefillOption = "512,1500",
    contexts: ContextsOption = "16,1500",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, whose medians are shown.")] = 5,
    backend: BackendOption = "auto",
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    json: JsonOption = None,
) -> None:
    """Measure prefill and decode speed of one request at a time, in this process."""
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL
    from midfill_lab.bench.speed import SpeedOptions, measure_speed, speed_table

    options = SpeedOptions(
        prefill=parse_counts(prefill), contexts=parse_counts(contexts), repeats=repeats
    )
    with show_steps("loading") as progress:
        report = measure_speed(
            model or DEFAULT_MODEL, options, threads, progress, backend=backend, device=device
        )
    publish(report, speed_table(report).drawn(), json)


@app.command()
def profile(
    model: ModelArgument = None,
    threads: ThreadsOption = None,
    json: JsonOption = None,
) -> None:
    """Show where a step's time goes on the CPU kernels, beside the least that it requires.

    MB and MFLOP are what a step requires: weights and KV read once, and the products. "least ms"
    is their time at the speed of memory, or at the rate that the chip reaches in registers;
    "reached" is that time as a share of the measured one.
    """
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL
    from midfill_lab.bench.profile import measure_profile, profile_tables

    with show_steps("loading") as progress:
        report = measure_profile(model or DEFAULT_MODEL, threads=threads, progress=progress)
    publish(report, Group(*(table.drawn() for table in profile_tables(report))), json)


@app.command()
def edits(
    url: UrlOption = None,
    model: LoadedModelOption = None,
    requests: Annotated[int, typer.Option(min=2, help="Requests of the session.")] = 120,
    output_tokens: OutputTokensOption = 8,
    seed: Annotated[int, typer.Option(help="Which session.")] = 0,
    fim_tokens: ClientFimTokensOption = None,
    threads: ThreadsOption = None,
    json: JsonOption = None,
) -> None:
    """Run an editing session under each prompt layout: tokens computed, time to first token.

    Layouts: psm, spm, efim (a fixed cut), planner (the server's own choice of the cut), and window
    (its choice of the text that it shows, too).
    """
    from midfill_lab.bench.clients import open_client
    from midfill_lab.bench.edits import edits_table, replay_edits

    console = Console(stderr=True)

    async def measure() -> None:
        async with open_client(url, model, fim_tokens, threads, console) as client:
            with show_steps("warming up") as progress:
                report = await replay_edits(
                    client,
                    rounds=requests,
                    output_tokens=output_tokens,
                    seed=seed,
                    progress=progress,
                )
        publish(report, edits_table(report).drawn(), json)

    asyncio.run(measure())


for _command in (batch, ceiling, peers, methods, scbench, serving):
    app.command()(_command)
