"""midfill bench scbench: what methods lose when several questions share one context."""

from pathlib import Path
from typing import Annotated

import typer

from midfill.cli.options import ThreadsOption
from midfill.cli.progress import show_steps
from midfill_lab.cli.bench.options import JsonOption, LoadedModelOption
from midfill_lab.cli.outputs import DocsOption, PlotOption, writable
from midfill_lab.reporting import publish_tables

MethodsOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:OPTION=VALUE,...],...",
        help="Methods to measure, separated by commas; all of midfill methods if not set. Full KV"
        " is always measured.",
    ),
]
BudgetsOption = Annotated[
    str,
    typer.Option(
        help="Shares of the prompt that methods keep (or tokens per layer, from 1 up), separated"
        " by commas."
    ),
]
LengthsOption = Annotated[
    list[int],
    typer.Option(
        "--length",
        min=200,
        metavar="TOKENS",
        help="Tokens of a context with its questions and answers (repeatable).",
    ),
]
TasksOption = Annotated[
    str | None, typer.Option(help="Tasks, separated by commas; all twelve if not set.")
]
ResultsOption = Annotated[
    Path | None,
    typer.Option(
        callback=writable,
        help="Write each result to this file as a line of JSON; the same command, run again,"
        " measures only what the file lacks.",
    ),
]


def scbench(
    model: LoadedModelOption = None,
    methods: MethodsOption = None,
    budgets: BudgetsOption = "0.25",
    length: LengthsOption = [2000],  # noqa: B006 (never changed)
    tasks: TasksOption = None,
    contexts: Annotated[int, typer.Option(min=1, help="Contexts per task and length.")] = 10,
    turns: Annotated[int, typer.Option(min=1, max=5, help="Questions per context.")] = 5,
    seed: Annotated[int, typer.Option(help="Chooses texts and questions.")] = 0,
    threads: ThreadsOption = None,
    results: ResultsOption = None,
    json: JsonOption = None,
    plot: PlotOption = None,
    docs: DocsOption = None,
) -> None:
    """Ask several questions about each context, in turns and as requests of their own (SCBench).

    Twelve kinds of contexts, generated at any length: string retrieval (kv, prefix_suffix, vt),
    semantic retrieval (repoqa, qa_eng, qa_chn, choice_eng), global information (many_shot, mf,
    summary), and two tasks at once (summary_with_needles, repoqa_and_kv). "held": later questions
    are answered from what a method kept before it saw them; "anew": from the exact KV in the
    cache, compressed for each question, as midfill serves them.
    """
    from midfill.methods.registry import METHODS
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL
    from midfill_lab.bench.methods.results import choose_variants, parse_budgets
    from midfill_lab.bench.scbench.measure import measure_scbench
    from midfill_lab.bench.scbench.plot import plot_scbench
    from midfill_lab.bench.scbench.report import scbench_tables
    from midfill_lab.bench.scbench.results import ResultFile, SCBenchOptions
    from midfill_lab.bench.scbench.tasks import choose_tasks

    options = SCBenchOptions(
        tasks=tuple(task.name for task in choose_tasks(tasks)),
        lengths=tuple(sorted(set(length))),
        contexts=contexts,
        turns=turns,
        seed=seed,
    )
    variants = choose_variants(methods or ",".join(METHODS), parse_budgets(budgets))
    with show_steps("loading") as progress:
        report = measure_scbench(
            model or DEFAULT_MODEL,
            variants,
            options,
            results=ResultFile(results),
            threads=threads,
            progress=progress,
        )
    publish_tables(report, scbench_tables(report), json=json, docs=docs, section="scbench")
    if plot is not None:
        plot_scbench(report, plot)
