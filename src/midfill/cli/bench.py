"""The ``midfill bench`` commands."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console

from midfill.cli.bench_blocks import blocks
from midfill.cli.bench_disaggregation import disaggregation
from midfill.cli.bench_gateway import gateway, gateway_rounds
from midfill.cli.bench_kv_dtypes import kv_dtypes
from midfill.cli.bench_methods import methods
from midfill.cli.bench_options import (
    ClientFimTokensOption,
    CompareOption,
    JsonOption,
    LoadedModelOption,
    OutputTokensOption,
    UrlOption,
)
from midfill.cli.bench_peers import peers
from midfill.cli.bench_plugins import plugins
from midfill.cli.bench_prefill import prefill
from midfill.cli.bench_reliability import kills, overload, soak
from midfill.cli.bench_replicas import cluster_simulation, replicas
from midfill.cli.bench_reuse import reuse
from midfill.cli.bench_tenants import tenants
from midfill.cli.bench_tiers import codecs, tiers
from midfill.cli.options import MethodOption, ModelArgument, ThreadsOption
from midfill.cli.outputs import DocsOption, PlotOption
from midfill.cli.progress import show_steps
from midfill.cli.values import parse_counts
from midfill.config import FimTokens
from midfill.errors import MidfillError
from midfill.reporting.publish import publish
from midfill.system.extras import require

if TYPE_CHECKING:
    from midfill.bench.rounds import RoundsOptions
    from midfill.bench.versions.report import VersionsReport

app = typer.Typer(
    no_args_is_help=True,
    help="Measure speed; tables on the terminal, figures as JSON, plots and Markdown.",
)


@app.callback()
def _bench() -> None:
    """Measure speed."""


app.command()(kills)
app.command()(overload)
app.command()(soak)
app.command()(peers)
app.command()(methods)
app.command()(prefill)
app.command()(plugins)
app.command()(gateway)
app.command()(gateway_rounds)
app.command()(disaggregation)
app.command()(blocks)
app.command()(replicas)
app.command()(cluster_simulation)
app.command()(reuse)
app.command()(tenants)
app.command()(tiers)
app.command()(codecs)
app.command()(kv_dtypes)


@app.command()
def rounds(
    url: UrlOption = None,
    model: LoadedModelOption = None,
    layouts: Annotated[
        str, typer.Option(help="Layouts to measure, separated by commas.")
    ] = "fim,efim,native",
    users: Annotated[
        int | None,
        typer.Option(min=1, help="Documents edited at once; 4 if not set, with --compare 2."),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, max=7, help="Requests per user; 5 if not set, with --compare 3."),
    ] = None,
    output_tokens: OutputTokensOption = 16,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Runs per layout, whose medians are shown; 3 if not set, with --compare 1.",
        ),
    ] = None,
    fim_tokens: ClientFimTokensOption = None,
    threads: ThreadsOption = None,
    seed: Annotated[int, typer.Option(help="Chooses the files.")] = 0,
    method: MethodOption = "none",
    compare: CompareOption = None,
    pairs: Annotated[
        int,
        typer.Option(
            min=6, help="With --compare: how many pairs of runs; more give narrower intervals."
        ),
    ] = 12,
    json: JsonOption = None,
    plot: PlotOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure EFIM's load: documents that grow at the caret, round after round.

    fim sends PRE prefix SUF suffix MID each time; efim keeps the first prefix in place and sends
    what grew after MID; native sends prefix and suffix and lets the server choose.
    """
    require("bench rounds", ["httpx"], extra="bench")
    from midfill.bench.clients import open_client
    from midfill.bench.rounds import (
        RoundsOptions,
        measure_rounds,
        parse_layouts,
        plot_rounds,
        rounds_table,
    )

    console = Console(stderr=True)
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
        raise MidfillError("--method is for a model loaded here: start the server with its own")
    if compare is not None:
        if url is not None or plot is not None:
            raise MidfillError("--compare runs both versions here: it takes no --url and no --plot")
        from midfill.bench.versions.rounds import compare_rounds

        arguments = _rounds_arguments(options, model, fim_tokens, threads)
        with show_steps("copying both versions") as progress:
            versions = compare_rounds(arguments, compare, pairs=pairs, progress=progress)
        _publish_versions(versions, json, docs)
        return

    async def measure() -> None:
        async with open_client(url, model, fim_tokens, threads, console, method) as client:
            with show_steps("warming up") as progress:
                report = await measure_rounds(client, options, progress)
        table = rounds_table(report)
        publish(report, table.drawn(), table.markdown(), section="rounds", json=json, docs=docs)
        if plot is not None:
            plot_rounds(report, plot)

    asyncio.run(measure())


@app.command()
def speed(
    model: ModelArgument = None,
    prefill: Annotated[str, typer.Option(help="Prompt lengths, separated by commas.")] = "512,1500",
    contexts: Annotated[
        str, typer.Option(help="Tokens before the first decoded one, separated by commas.")
    ] = "16,1500",
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Runs of each, whose medians are shown; 5 if not set. With --compare: requests of"
            " each per version and restart; if not set, more of short prompts than of long ones.",
        ),
    ] = None,
    threads: ThreadsOption = None,
    compare: CompareOption = None,
    pairs: Annotated[
        int,
        typer.Option(
            min=6,
            help="With --compare: how often both versions are restarted; more give narrower"
            " intervals.",
        ),
    ] = 15,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure prefill and decode speed of one request at a time, in this process."""
    from midfill.checkpoints.model_store import DEFAULT_MODEL

    if compare is not None:
        from midfill.bench.versions.speed import CompareSpeedOptions, compare_speed

        compared = CompareSpeedOptions(
            model=_absolute(model or DEFAULT_MODEL),
            prefill=parse_counts(prefill),
            contexts=parse_counts(contexts),
            repeats=repeats,
            threads=threads,
        )
        with show_steps("copying both versions") as progress:
            versions = compare_speed(compared, compare, pairs=pairs, progress=progress)
        _publish_versions(versions, json, docs)
        return
    from midfill.bench.speed import SpeedOptions, measure_speed, speed_table

    options = SpeedOptions(
        prefill=parse_counts(prefill), contexts=parse_counts(contexts), repeats=repeats or 5
    )
    with show_steps("loading") as progress:
        report = measure_speed(model or DEFAULT_MODEL, options, threads, progress)
    table = speed_table(report)
    publish(report, table.drawn(), table.markdown(), section="speed", json=json, docs=docs)


def _publish_versions(report: "VersionsReport", json: Path | None, docs: Path | None) -> None:
    """Show the ratios of two versions."""
    from midfill.bench.versions.report import versions_table

    table = versions_table(report)
    section = f"{report.benchmark}-versions"
    publish(report, table.drawn(), table.markdown(), section=section, json=json, docs=docs)


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
        arguments += ["--model", _absolute(model)]
    if fim_tokens is not None:
        arguments += ["--fim-tokens", ",".join(fim_tokens)]
    if threads is not None:
        arguments += ["--threads", str(threads)]
    return arguments


def _absolute(model: str) -> str:
    """Return a model that is named by a path by its absolute path."""
    return str(Path(model).absolute()) if Path(model).exists() else model


@app.command()
def profile(
    model: ModelArgument = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Take a model of this shape with random weights instead, see bench peers.",
        ),
    ] = None,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Show where a step's time goes on the CPU kernels, beside the least that it requires.

    MB and MFLOP are what a step requires: weights and KV read once, and the products. "least ms"
    is their time at the speed of memory, or at the rate that the chip reaches in registers;
    "reached" is that time as a share of the measured one. With --shape, --docs replaces the section
    of that shape.
    """
    from midfill.bench.peers.shapes import random_model
    from midfill.bench.profile import measure_profile, profile_markdown, profile_tables
    from midfill.checkpoints.model_store import DEFAULT_MODEL

    if shape is not None and model is not None:
        raise MidfillError("--shape makes a model of its own: it goes without a model")
    with show_steps("loading") as progress:
        name = str(random_model(shape, progress)) if shape else model or DEFAULT_MODEL
        report = measure_profile(name, threads=threads, progress=progress)
    drawn, markdown = profile_tables(report), profile_markdown(report)
    section = f"profile-{shape}" if shape else "profile"
    publish(report, drawn, markdown, section=section, json=json, docs=docs)


@app.command()
def schedulers(
    model: ModelArgument = None,
    prompt: Annotated[int, typer.Option(min=256, help="Tokens of the prompt.")] = 2000,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, whose medians are shown.")] = 7,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Compare prefill by chunks and by layers, beside running answers and alone."""
    from midfill.bench.schedulers import measure_schedulers, scheduler_table
    from midfill.checkpoints.model_store import DEFAULT_MODEL

    with show_steps("loading") as progress:
        report = measure_schedulers(
            model or DEFAULT_MODEL,
            prompt=prompt,
            repeats=repeats,
            threads=threads,
            progress=progress,
        )
    table = scheduler_table(report)
    publish(report, table.drawn(), table.markdown(), section="schedulers", json=json, docs=docs)


@app.command()
def stops(
    model: ModelArgument = None,
    rows: Annotated[int, typer.Option(min=1, help="Of the prefill.")] = 1024,
    pairs: Annotated[int, typer.Option(min=6, help="Runs of each kind.")] = 40,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure what it costs a prefill to stop after each layer, as some methods have it do."""
    from midfill.bench.stops import measure_stops, stops_table
    from midfill.checkpoints.model_store import DEFAULT_MODEL

    with show_steps("loading") as progress:
        report = measure_stops(
            model or DEFAULT_MODEL, rows=rows, pairs=pairs, threads=threads, progress=progress
        )
    table = stops_table(report)
    publish(report, table.drawn(), table.markdown(), section="stops", json=json, docs=docs)


@app.command()
def cascade(
    model: ModelArgument = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, whose medians are shown.")] = 3,
    files: Annotated[int, typer.Option(min=1, help="Prompts whose next tokens are scored.")] = 4,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure CAKE's cascade beside its one-shot form: slots, time, and what answers see."""
    from midfill.bench.cascade import cascade_table, measure_cascade
    from midfill.checkpoints.model_store import DEFAULT_MODEL

    with show_steps("loading") as progress:
        report = measure_cascade(
            model or DEFAULT_MODEL,
            repeats=repeats,
            files=files,
            threads=threads,
            progress=progress,
        )
    table = cascade_table(report)
    publish(report, table.drawn(), table.markdown(), section="cascade", json=json, docs=docs)


@app.command()
def pruning(
    model: ModelArgument = None,
    tokens: Annotated[int, typer.Option(min=128, help="Of each prompt, about.")] = 4000,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each kind and depth.")] = 2,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure methods that drop rows of a prompt between layers: time, work, and answers."""
    from midfill.bench.pruning import measure_pruning, pruning_table
    from midfill.checkpoints.model_store import DEFAULT_MODEL

    with show_steps("loading") as progress:
        report = measure_pruning(
            model or DEFAULT_MODEL,
            tokens=tokens,
            repeats=repeats,
            threads=threads,
            progress=progress,
        )
    table = pruning_table(report)
    publish(report, table.drawn(), table.markdown(), section="pruning", json=json, docs=docs)


@app.command()
def precision(
    model: ModelArgument = None,
    tokens: Annotated[int, typer.Option(min=100, help="How many to compare, about.")] = 20_000,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure what rounding weights, activations and KV costs: divergence from float32 on code."""
    from midfill.bench.precision import measure_precision, precision_table
    from midfill.checkpoints.model_store import DEFAULT_MODEL

    with show_steps("loading") as progress:
        report = measure_precision(
            model or DEFAULT_MODEL, tokens=tokens, threads=threads, progress=progress
        )
    table = precision_table(report)
    publish(report, table.drawn(), table.markdown(), section="precision", json=json, docs=docs)


@app.command()
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
    from midfill.bench.edits.measure import (
        QUICK,
        EditsOptions,
        edits_markdown,
        edits_table,
        run_edits,
    )

    options = msgspec.structs.replace(
        QUICK if quick else EditsOptions(),
        seed=seed,
        repositories=list(git or ()),
    )
    counting: dict[str, Any] = {}
    if model is not None:
        from midfill.checkpoints.model_store import resolve
        from midfill.checkpoints.opening import open_checkpoint

        counting = {"tokenize": open_checkpoint(resolve(model)).tokenizer.encode, "unit": model}
    with show_steps("preparing") as progress:
        report = run_edits(options, progress=progress, **counting)
    drawn, markdown = edits_table(report), edits_markdown(report)
    publish(report, drawn, markdown, section="edits", json=json, docs=docs)


@app.command()
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
    from midfill.bench.clients import open_client
    from midfill.bench.edits.replay import replay_edits, replay_table

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
