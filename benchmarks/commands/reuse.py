"""python -m benchmarks reuse: what methods of KV reuse save and cost."""

from typing import TYPE_CHECKING, Annotated

import typer

from midfill.cli.bench.methods import draw_lines
from midfill.cli.bench.options import JsonOption, LoadedModelOption
from midfill.cli.options import ThreadsOption
from midfill.cli.outputs import DocsOption
from midfill.cli.progress import show_steps

if TYPE_CHECKING:
    pass

_METHODS = (
    "cacheblend:ratio=0 cacheblend:ratio=0.15 cacheblend:ratio=0.3 ape:temperature=1,scale=1 ape"
)

MethodsOption = Annotated[
    str, typer.Option(help="Methods with their options, separated by blanks.")
]
WindowsOption = Annotated[
    str,
    typer.Option(help="Windows of jumps, characters before/after the caret, by commas."),
]
JumpsOption = Annotated[int, typer.Option(min=0, help="Jumps of the caret per window.")]
ContextsOption = Annotated[
    int, typer.Option(min=0, help="Prompts with files that were shown before.")
]
SeedOption = Annotated[int, typer.Option(help="All chance follows from it.")]


def reuse(
    model: LoadedModelOption = None,
    methods: MethodsOption = _METHODS,
    windows: WindowsOption = "2000/600,6000/1500",
    jumps: JumpsOption = 60,
    contexts: ContextsOption = 12,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure methods that take KV from elsewhere: jumps of the caret, files shown before.

    Counted work and time to the first token, and how far its distribution and the answers are from
    the exact ones. Without jumps, only prompts with files are measured, for a section of their own.
    """
    from benchmarks.reuse.measure import measure_reuse
    from benchmarks.reuse.report import reuse_table
    from benchmarks.reuse.results import ReuseOptions
    from midfill.errors import MidfillError
    from midfill.lab.evaluation.metrics import is_exact_first_line
    from midfill.methods.registry import methods_of, parse_name, resolve_method
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL
    from midfill.system.reporting.publish import publish, saver

    chosen = methods.split()
    for specification in chosen:
        resolve_method(specification)
        if parse_name(specification) not in methods_of("reuse"):
            others = " and ".join(methods_of("reuse"))
            raise MidfillError(f"{specification} takes no KV from elsewhere, as {others} do")
    if not jumps and not contexts:
        raise MidfillError("there is nothing to measure: --jumps or --contexts must be above 0")
    options = ReuseOptions(
        methods=chosen,
        windows=[name.strip() for name in windows.split(",")] if jumps else [],
        jumps=jumps,
        contexts=contexts,
        seed=seed,
    )

    with show_steps("loading") as progress:
        report = measure_reuse(
            model or DEFAULT_MODEL,
            options,
            draw_holes=draw_lines,
            is_exact=is_exact_first_line,
            threads=threads,
            progress=progress,
            save=saver(json),
        )
    table = reuse_table(report)
    section = "reuse" if jumps else "reuse-files"
    publish(report, table.drawn(), table.markdown(), section=section, json=json, docs=docs)
