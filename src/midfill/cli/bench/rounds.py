"""midfill bench rounds: EFIM's load."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from midfill.cli.bench.options import (
    ClientFimTokensOption,
    CompareOption,
    JsonOption,
    LoadedModelOption,
    OutputTokensOption,
    UrlOption,
)
from midfill.cli.bench.versions import absolute_model, publish_versions
from midfill.cli.options import MethodOption, ThreadsOption
from midfill.cli.outputs import DocsOption, PlotOption
from midfill.cli.progress import show_steps
from midfill.config import FimTokens
from midfill.errors import OptionError
from midfill.system.extras import require
from midfill.system.reporting.publish import publish

if TYPE_CHECKING:
    from midfill.lab.bench.rounds import RoundsOptions, RoundsReport

LayoutsOption = Annotated[str, typer.Option(help="Layouts to measure, separated by commas.")]
UsersOption = Annotated[
    int | None,
    typer.Option(min=1, help="Documents edited at once; 4 if not set, with --compare 2."),
]
RoundsOption = Annotated[
    int | None,
    typer.Option(min=1, max=7, help="Requests per user; 5 if not set, with --compare 3."),
]
RepeatsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Runs per layout, whose medians are shown; 3 if not set, with --compare 1.",
    ),
]
SeedOption = Annotated[int, typer.Option(help="Chooses the files.")]
PairsOption = Annotated[
    int,
    typer.Option(
        min=6, help="With --compare: how many pairs of runs; more give narrower intervals."
    ),
]


def rounds(
    url: UrlOption = None,
    model: LoadedModelOption = None,
    layouts: LayoutsOption = "fim,efim,native",
    users: UsersOption = None,
    rounds: RoundsOption = None,
    output_tokens: OutputTokensOption = 16,
    repeats: RepeatsOption = None,
    fim_tokens: ClientFimTokensOption = None,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    method: MethodOption = "none",
    compare: CompareOption = None,
    pairs: PairsOption = 12,
    json: JsonOption = None,
    plot: PlotOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure EFIM's load: documents that grow at the caret, round after round.

    fim sends PRE prefix SUF suffix MID each time; efim keeps the first prefix in place and sends
    what grew after MID; native sends prefix and suffix and lets the server choose.
    """
    require("bench rounds", ["httpx"], extra="bench")
    from midfill.lab.bench.rounds import (
        RoundsOptions,
        parse_layouts,
        plot_rounds,
        rounds_table,
    )

    options = RoundsOptions(
        layouts=parse_layouts(layouts),
        users=users or (2 if compare else 4),
        rounds=rounds or (3 if compare else 5),
        output_tokens=output_tokens,
        repeats=repeats or (1 if compare else 3),
        seed=seed,
        method=method,
    )
    if url is not None and method != "none":
        raise OptionError("--method is for a model loaded here: start the server with its own")
    if compare is not None:
        if url is not None or plot is not None:
            raise OptionError("--compare runs both versions here: it takes no --url and no --plot")
        from midfill.lab.bench.versions.rounds import compare_rounds

        arguments = _rounds_arguments(options, model, fim_tokens, threads)
        with show_steps("copying both versions") as progress:
            versions = compare_rounds(arguments, compare, pairs=pairs, progress=progress)
        publish_versions(versions, json, docs)
        return

    report = asyncio.run(_measure(options, url, model, fim_tokens, threads))
    table = rounds_table(report)
    publish(report, table.drawn(), table.markdown(), section="rounds", json=json, docs=docs)
    if plot is not None:
        plot_rounds(report, plot)


async def _measure(
    options: "RoundsOptions",
    url: str | None,
    model: str | None,
    fim_tokens: FimTokens | None,
    threads: int | None,
) -> "RoundsReport":
    """Measure a server, or a model that is loaded here."""
    from midfill.lab.bench.clients import open_client
    from midfill.lab.bench.rounds import measure_rounds

    console = Console(stderr=True)
    async with open_client(url, model, fim_tokens, threads, console, options.method) as client:
        with show_steps("warming up") as progress:
            return await measure_rounds(client, options, progress)


def _rounds_arguments(
    options: "RoundsOptions",
    model: str | None,
    fim_tokens: FimTokens | None,
    threads: int | None,
) -> list[str]:
    """Return the arguments that make ``bench rounds`` run with these options."""
    arguments = ["--layouts", ",".join(options.layouts), "--seed", str(options.seed)]
    for name in ("users", "rounds", "output_tokens", "repeats"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    if options.method != "none":
        arguments += ["--method", options.method]
    if model is not None:
        arguments += ["--model", absolute_model(model)]
    if fim_tokens is not None:
        arguments += ["--fim-tokens", ",".join(fim_tokens)]
    if threads is not None:
        arguments += ["--threads", str(threads)]
    return arguments
