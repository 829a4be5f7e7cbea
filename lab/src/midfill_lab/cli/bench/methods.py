"""midfill bench methods: what each method of KV compression costs in quality, and what it saves."""

from typing import Annotated

import msgspec
import typer
from rich.console import Group

from midfill.cli.options import ThreadsOption
from midfill.cli.progress import show_steps
from midfill.cli.values import parse_names
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import earlier_run
from midfill_lab.reporting import publish, saver

MethodsOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:OPTION=VALUE,...],...",
        help="Methods to measure, separated by commas, such as snapkv,cake:window=16; those that"
        " act together are joined with +. All there are if not set. Full KV is always measured.",
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
NullsOption = Annotated[
    bool,
    typer.Option(
        "--nulls",
        help="Measure each method's nulls, too, by needles: its budget spent at random, evenly, by"
        " the plain score, or without what the method adds. Nulls of methods that choose in each"
        " row predict code, too.",
    ),
]
MeasureOption = Annotated[
    str | None,
    typer.Option(
        metavar="PART,...",
        help="What to measure, separated by commas: needles, questions, code, lines, costs; all if"
        " not set.",
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        min=200,
        help="Tokens of a context with needles or questions; 2000, with --quick 1000.",
    ),
]
NeedlesOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Contexts with needles at each depth, each with one needle and with several; 8, with"
        " --quick 1.",
    ),
]
CodeContextOption = Annotated[
    int | None,
    typer.Option(
        min=16, help="Tokens of a file before the code that is predicted; 1500, with --quick 1000."
    ),
]
CodeTokensOption = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens of code that are predicted per file; 128, with --quick 64."),
]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="Fewer and shorter prompts: under five minutes.")
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue the run in --json with the same lengths: measure only what it lacks, such as"
        " a further method or part.",
    ),
]


def methods(
    methods: MethodsOption = None,
    budgets: BudgetsOption = None,
    models: ModelsOption = None,
    nulls: NullsOption = False,
    measure: MeasureOption = None,
    context: ContextOption = None,
    needles: NeedlesOption = None,
    code_context: CodeContextOption = None,
    code_tokens: CodeTokensOption = None,
    quick: QuickOption = False,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    resume: ResumeOption = False,
) -> None:
    """Measure every method of KV compression beside full KV, on the same prompts.

    Quality: needles in real source text, SCBench's shared contexts in its two modes, prediction of
    held-out code, infilling. Costs: slots and bytes held, time to first token, decoding speed.
    With --nulls, also whether a method beats its budget spent on something else.
    """
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL
    from midfill_lab.bench.methods.measure import measure_methods
    from midfill_lab.bench.methods.report import methods_tables
    from midfill_lab.bench.methods.results import (
        PARTS,
        QUICK,
        MethodsOptions,
        choose_parts,
        choose_variants,
        parse_budgets,
        read_methods_report,
    )

    earlier = earlier_run(json, resume, read_methods_report)
    chosen = parse_budgets(budgets or ("0.25" if quick else "0.5,0.25,0.125"))
    variants = choose_variants(methods, chosen, nulls=nulls)
    parts = PARTS if measure is None else parse_names(measure, PARTS, "--measure")
    options = choose_parts(QUICK if quick else MethodsOptions(), parts)
    lengths = {"context": context, "code_context": code_context, "code_tokens": code_tokens}
    given = {name: length for name, length in lengths.items() if length is not None}
    options = msgspec.structs.replace(options, **given)
    if needles is not None and "needles" in parts:
        options = msgspec.structs.replace(options, needles=needles)

    with show_steps("loading") as progress:
        report = measure_methods(
            [name.strip() for name in (models or DEFAULT_MODEL).split(",")],
            variants,
            options,
            threads=threads,
            progress=progress,
            save=saver(json),
            earlier=earlier,
        )
    publish(report, Group(*(table.drawn() for table in methods_tables(report))), json)
