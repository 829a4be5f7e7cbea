"""midfill bench edits: an editing session, run under each prompt layout."""

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
from midfill.cli.options import ThreadsOption
from midfill.cli.progress import show_steps
from midfill.system.extras import require
from midfill.system.reporting import publish


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
    require("bench edits", ["httpx"], extra="bench")
    from midfill.lab.bench.clients import open_client
    from midfill.lab.bench.edits import edits_table, replay_edits

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
