"""midfill bench edits and replay: editing sessions, counted and run."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
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
from midfill.cli.outputs import DocsOption
from midfill.cli.progress import show_steps
from midfill.system.extras import require
from midfill.system.reporting.publish import publish

if TYPE_CHECKING:
    pass


def edits(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sessions: under 40 s.")] = False,
    git: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH[@COMMIT]",
            help="A local git repository whose history, up to HEAD or to that commit, is replayed"
            " too; repeatable.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Count this model's tokens; pieces of words if not set."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all random choices.")] = 0,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Count what editing sessions cost under each prompt layout, without running a model.

    Layouts: psm, spm, efim (a fixed cut), planner (what midfill does), and clairvoyant (the
    cheapest cuts with the whole future known). Sessions come from an editing mix over files of the
    standard library and from git histories.
    """
    from midfill.lab.bench.edits.measure import QUICK, EditsOptions, run_edits
    from midfill.lab.bench.edits.report import edits_markdown, edits_table

    options = msgspec.structs.replace(
        QUICK if quick else EditsOptions(),
        seed=seed,
        repositories=list(git or ()),
    )
    counting: dict[str, Any] = {}
    if model is not None:
        from midfill.models.checkpoints.model_store import resolve
        from midfill.models.checkpoints.opening import open_checkpoint

        counting = {"tokenize": open_checkpoint(resolve(model)).tokenizer.encode, "unit": model}
    with show_steps("preparing") as progress:
        report = run_edits(options, progress=progress, **counting)
    drawn, markdown = edits_table(report), edits_markdown(report)
    publish(report, drawn, markdown, section="edits", json=json, docs=docs)


def replay(
    url: UrlOption = None,
    model: LoadedModelOption = None,
    requests: Annotated[int, typer.Option(min=2, help="Requests of the session.")] = 120,
    output_tokens: OutputTokensOption = 8,
    seed: Annotated[int, typer.Option(help="Which session.")] = 0,
    fim_tokens: ClientFimTokensOption = None,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Replay an editing session against a model: tokens computed and time to first token.

    The session is a short one of 'bench edits', laid out in each way; planner is the server's own
    choice.
    """
    require("bench replay", ["httpx"], extra="bench")
    from midfill.lab.bench.clients import open_client
    from midfill.lab.bench.edits.replay import replay_edits, replay_table

    console = Console(stderr=True)

    async def measure() -> None:
        async with open_client(url, model, fim_tokens, threads, console) as client:
            name = await client.model()
            with show_steps("warming up") as progress:
                results = await replay_edits(
                    client,
                    rounds=requests,
                    output_tokens=output_tokens,
                    seed=seed,
                    progress=progress,
                )
        table = replay_table(results, name)
        publish(results, table.drawn(), table.markdown(), section="replay", json=json, docs=docs)

    asyncio.run(measure())
