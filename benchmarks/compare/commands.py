"""``python -m benchmarks compare``: this tree beside a commit of its repository, in turn."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.compare.ratios import VersionsReport, versions_table
from benchmarks.compare.rounds import compare_rounds
from benchmarks.compare.speed import CompareSpeedOptions, compare_speed
from benchmarks.report import publish
from midfill.cli.options import MethodOption, ThreadsOption
from midfill.cli.progress import show_steps
from midfill.cli.values import parse_counts, parse_names
from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from midfill_lab.bench.rounds import LAYOUTS, RoundsOptions
from midfill_lab.cli.bench.app import (
    LayoutsOption,
    RepeatsOption,
    RoundsOption,
    SeedOption,
    UsersOption,
)
from midfill_lab.cli.bench.options import (
    ClientFimTokensOption,
    JsonOption,
    LoadedModelOption,
    OutputTokensOption,
)
from midfill_lab.cli.outputs import DocsOption

CommitArgument = Annotated[
    str, typer.Argument(metavar="COMMIT", help="A commit of this tree's git repository.")
]
PrefillOption = Annotated[str, typer.Option(help="Prompt lengths, separated by commas.")]
ContextsOption = Annotated[
    str, typer.Option(help="Tokens before the first decoded one, separated by commas.")
]
StreamsOption = Annotated[
    int, typer.Option(min=1, help="Answers decoded at once, measured as well; 1 for none.")
]
StreamContextsOption = Annotated[
    str, typer.Option(help="Like --contexts, where several are decoded.")
]
RequestsOption = Annotated[
    int | None,
    typer.Option(
        "--repeats",
        min=1,
        help="Requests of each per version and restart; if not set, more of short prompts than of"
        " long ones.",
    ),
]
RestartsOption = Annotated[
    int,
    typer.Option(
        "--pairs",
        min=6,
        help="How often both versions are restarted; more give narrower intervals.",
    ),
]
PairsOption = Annotated[
    int, typer.Option(min=6, help="How many pairs of runs; more give narrower intervals.")
]

compare = typer.Typer(
    no_args_is_help=True,
    help="Measure this tree beside a commit of its git repository, in turn: how many times as fast"
    " it is, with 95% intervals.",
)


@compare.callback()
def _compare() -> None:
    """Compare two versions."""


@compare.command()
def speed(
    commit: CommitArgument,
    model: LoadedModelOption = None,
    prefill: PrefillOption = "512,1500",
    contexts: ContextsOption = "16,1500",
    streams: StreamsOption = 16,
    stream_contexts: StreamContextsOption = "16,500",
    repeats: RequestsOption = None,
    threads: ThreadsOption = None,
    pairs: RestartsOption = 15,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Compare prefill and decode, both versions loaded at once and asked in turn."""
    options = CompareSpeedOptions(
        model=_absolute(model or DEFAULT_MODEL),
        prefill=parse_counts(prefill),
        contexts=parse_counts(contexts),
        streams=streams,
        stream_contexts=parse_counts(stream_contexts),
        repeats=repeats,
        threads=threads,
    )
    with show_steps("copying both versions") as progress:
        report = compare_speed(options, commit, pairs=pairs, progress=progress)
    _publish(report, json, docs)


@compare.command()
def rounds(
    commit: CommitArgument,
    model: LoadedModelOption = None,
    layouts: LayoutsOption = "fim,efim,native",
    users: UsersOption = 2,
    rounds: RoundsOption = 3,
    output_tokens: OutputTokensOption = 16,
    repeats: RepeatsOption = 1,
    fim_tokens: ClientFimTokensOption = None,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    method: MethodOption = "none",
    pairs: PairsOption = 12,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Compare EFIM's load, in pairs of runs; the commit has to know the options, too."""
    options = RoundsOptions(
        layouts=parse_names(layouts, LAYOUTS, "--layouts"),
        users=users,
        rounds=rounds,
        output_tokens=output_tokens,
        repeats=repeats,
        seed=seed,
        method=method,
    )
    arguments = ["--layouts", ",".join(options.layouts), "--seed", str(options.seed)]
    for name in ("users", "rounds", "output_tokens", "repeats"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    if method != "none":
        arguments += ["--method", method]
    if model is not None:
        arguments += ["--model", _absolute(model)]
    if fim_tokens is not None:
        arguments += ["--fim-tokens", ",".join(fim_tokens)]
    if threads is not None:
        arguments += ["--threads", str(threads)]
    with show_steps("copying both versions") as progress:
        report = compare_rounds(arguments, commit, pairs=pairs, progress=progress)
    _publish(report, json, docs)


def _publish(report: VersionsReport, json: Path | None, docs: Path | None) -> None:
    section = f"{report.benchmark}-versions"
    publish(report, versions_table(report), section=section, json=json, docs=docs)


def _absolute(model: str) -> str:
    """Return a model that is named by a path by its absolute path."""
    return str(Path(model).absolute()) if Path(model).exists() else model
