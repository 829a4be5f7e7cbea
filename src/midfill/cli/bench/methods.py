"""midfill bench methods: what each method of KV compression costs in quality, and what it saves."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from midfill.cli.bench.options import JsonOption
from midfill.cli.options import ThreadsOption
from midfill.cli.outputs import DocsOption, PlotOption
from midfill.cli.progress import show_steps

if TYPE_CHECKING:
    from midfill.lab.bench.methods.results import Hole

MethodsOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:OPTION=VALUE,...],...",
        help="Methods to measure, separated by commas, such as snapkv,cake:window=16; all"
        " there are if not set. Full KV is always measured.",
    ),
]
BudgetsOption = Annotated[
    str | None,
    typer.Option(
        help="Shares of the prompt that methods keep (or tokens per layer, from 1 up),"
        " separated by commas; 0.5,0.25,0.125 if not set, with --quick 0.25."
    ),
]
ModelsOption = Annotated[
    str | None,
    typer.Option(help="Models to measure with, separated by commas; the default model if not set."),
]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="Fewer and shorter prompts: under five minutes.")
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue the run in --json with the same options: measure only what it lacks,"
        " such as a further method.",
    ),
]


def methods(
    methods: MethodsOption = None,
    budgets: BudgetsOption = None,
    models: ModelsOption = None,
    quick: QuickOption = False,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    resume: ResumeOption = False,
    plot: PlotOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure every method of KV compression beside full KV, on the same prompts.

    Quality: needles in real source text, SCBench's shared contexts in its two modes, prediction of
    held-out code, infilling. Costs: slots and bytes held, time to first token, decoding speed.
    """
    from midfill.errors import OptionError
    from midfill.lab.bench.methods.plot import plot_methods
    from midfill.lab.bench.methods.report import methods_markdown, methods_tables
    from midfill.lab.bench.methods.results import QUICK, MethodsOptions, read_methods_report
    from midfill.lab.bench.methods.run import measure_methods
    from midfill.lab.bench.methods.variants import choose_variants, parse_budgets
    from midfill.lab.evaluation.metrics import is_exact_first_line
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL
    from midfill.system.reporting.publish import publish, saver

    if resume and json is None:
        raise OptionError("--resume continues what a file holds: name it with --json")
    chosen = parse_budgets(budgets or ("0.25" if quick else "0.5,0.25,0.125"))
    variants = choose_variants(methods, chosen)

    with show_steps("loading") as progress:
        report = measure_methods(
            [name.strip() for name in (models or DEFAULT_MODEL).split(",")],
            variants,
            QUICK if quick else MethodsOptions(),
            draw_holes=draw_lines,
            is_exact=is_exact_first_line,
            threads=threads,
            progress=progress,
            save=saver(json),
            earlier=read_methods_report(json) if resume and json and json.exists() else None,
        )
    publish(
        report,
        methods_tables(report),
        methods_markdown(report),
        section="methods",
        json=json,
        docs=docs,
    )
    if plot is not None:
        plot_methods(report, plot)


def draw_lines(texts: Sequence[str], count: int) -> "list[Hole]":
    """Draw rests of lines out of source files, as the evaluation does."""
    from midfill.lab.bench.methods.results import Hole
    from midfill.lab.evaluation.holes import draw_holes
    from midfill.lab.evaluation.source_files import SourceFile

    files = [SourceFile(f"{number}.py", text) for number, text in enumerate(texts)]
    return [
        Hole(problem.id, problem.prefix, problem.hole, problem.suffix)
        for problem in draw_holes(files, "line", count, seed=0)
    ]
