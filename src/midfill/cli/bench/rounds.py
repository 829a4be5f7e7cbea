"""midfill bench rounds: EFIM's load."""

import asyncio
from typing import Annotated

import typer
from rich.console import Console

from midfill.cli.bench.options import (
    ClientFimTokensOption,
    JsonOption,
    LoadedModelOption,
    OutputTokensOption,
    UrlOption,
)
from midfill.cli.options import MethodOption, ThreadsOption
from midfill.cli.progress import show_steps
from midfill.errors import OptionError
from midfill.system.extras import require
from midfill.system.reporting import publish

LayoutsOption = Annotated[str, typer.Option(help="Layouts to measure, separated by commas.")]
UsersOption = Annotated[int, typer.Option(min=1, help="Documents edited at once.")]
RoundsOption = Annotated[int, typer.Option(min=1, max=7, help="Requests per user.")]
RepeatsOption = Annotated[
    int, typer.Option(min=1, help="Runs per layout, whose medians are shown.")
]
SeedOption = Annotated[int, typer.Option(help="Chooses the files.")]


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
    require("bench rounds", ["httpx"], extra="bench")
    from midfill.lab.bench.clients import open_client
    from midfill.lab.bench.rounds import RoundsOptions, measure_rounds, parse_layouts, rounds_table

    if url is not None and method != "none":
        raise OptionError("--method is for a model loaded here: start the server with its own")
    options = RoundsOptions(
        layouts=parse_layouts(layouts),
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
