"""The ``midfill eval`` commands."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midfill.cli.option_groups import with_option_groups
from midfill.cli.options import KVCacheDtypeOption
from midfill.config import KVCacheDtypeName
from midfill_lab.cli.evaluation.choices import cuts, empty, snippets, windows
from midfill_lab.cli.evaluation.confidence import confidence
from midfill_lab.cli.evaluation.far import far
from midfill_lab.cli.evaluation.options import (
    CandidatesOption,
    ConditionsOption,
    ContextOption,
    FilesOption,
    HumanEvalOption,
    LimitOption,
    MaxTokensOption,
    MethodsOption,
    ModelFlags,
    ResultFlags,
    SeedOption,
    SuffixesOption,
    TasksOption,
    TypedOption,
    UrlOption,
    choose_tasks,
    parse_context,
    parse_suffixes,
)
from midfill_lab.cli.evaluation.reuse import reuse
from midfill_lab.cli.outputs import DocsOption, Outputs, PlotOption, SectionOption

if TYPE_CHECKING:
    from midfill.system.progress import Progress
    from midfill_lab.evaluation.evaluate import InfillingReport
    from midfill_lab.evaluation.models import Model

app = typer.Typer(
    no_args_is_help=True,
    help="Measure how good answers are; tables, JSON, plots, and comparisons.",
)


@app.callback()
def _eval() -> None:
    """Measure how good answers are."""


app.command()(cuts)
app.command()(windows)
app.command()(snippets)
app.command()(empty)
app.command()(reuse)
app.command()(far)
app.command()(confidence)


@app.command()
@with_option_groups
def infilling(
    *,
    humaneval: HumanEvalOption = None,
    files: FilesOption = None,
    asked: ModelFlags,
    url: UrlOption = None,
    tasks: TasksOption = None,
    conditions: ConditionsOption = None,
    method: MethodsOption = None,
    candidates: CandidatesOption = 1,
    limit: LimitOption = 200,
    seed: SeedOption = 0,
    max_tokens: MaxTokensOption = None,
    context_characters: ContextOption = "2000,1000",
    typed: TypedOption = False,
    suffixes: SuffixesOption = ".py",
    kv_cache_dtype: KVCacheDtypeOption = "auto",
    results: ResultFlags,
    section: SectionOption = "infilling",
) -> None:
    """Measure infilling: pass@1 on HumanEval-Infilling, exact match in held-out files.

    Every hole is asked in every condition: the prefix alone, PSM, SPM, EFIM cut at a random
    character, the first and the last of these with token healing, and as midfill lays prompts out.
    With --method, each of them once more for each method of KV compression; with --candidates,
    the last one.
    """
    from midfill.errors import OptionError
    from midfill_lab.evaluation.conditions import (
        choose_conditions,
        parse_conditions,
        with_candidates,
        with_methods,
    )
    from midfill_lab.evaluation.evaluate import RunOptions, load_problems

    if url is not None and (asked.model or asked.adapter or typed):
        raise OptionError(
            "--url can't be combined with --model, --adapter or --typed: the server has a model"
        )
    results.earlier  # noqa: B018 - read now
    if (method or candidates > 1) and conditions is None:
        conditions = "auto"
    names = None if conditions is None else parse_conditions(conditions)
    before, after = parse_context(context_characters)
    options = RunOptions(
        tasks=choose_tasks(tasks, humaneval, files or []),
        limit=limit,
        seed=seed,
        before=before,
        after=after,
        typed=typed,
        max_tokens=max_tokens,
        suffixes=parse_suffixes(suffixes),
    )
    problems = load_problems(options, humaneval, files or [])

    report = results.run(
        partial(_open_model, url, asked, kv_cache_dtype),
        problems,
        lambda model: with_candidates(
            with_methods(choose_conditions(names, model.format, remote=model.remote), method or ()),
            candidates,
        ),
        options,
    )
    _show(report, results.outputs(section))


def _open_model(
    url: str | None, asked: ModelFlags, kv_cache_dtype: KVCacheDtypeName, progress: "Progress"
) -> "AbstractContextManager[Model]":
    """Return the model behind a URL, or loaded into this process."""
    from midfill_lab.evaluation.models import RemoteModel

    if url is not None:
        return nullcontext(RemoteModel(url, asked.fim_tokens))
    return asked.open(progress, kv_cache_dtype)


@app.command()
def show(
    results: Annotated[Path, typer.Argument(metavar="A.json", help="Written by 'eval infilling'.")],
    plot: PlotOption = None,
    docs: DocsOption = None,
    section: SectionOption = "infilling",
) -> None:
    """Print the tables of a run from its JSON file, even of an interrupted run."""
    from midfill_lab.evaluation.report import read_report

    _show(read_report(results), Outputs(plot, docs, section))


def _show(report: "InfillingReport", outputs: Outputs) -> None:
    from midfill_lab.evaluation.report import plot_report, report_tables

    outputs.show(report_tables(report), partial(plot_report, report))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="Written by 'eval infilling'.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Written for the other model.")],
    pair: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A=B",
            help="Compare condition A of the first with B of the second, as in prefix-only=psm;"
            " repeatable. By default each condition with itself.",
        ),
    ] = None,
    docs: DocsOption = None,
    section: SectionOption = "comparison",
) -> None:
    """Compare two runs over the holes they share."""
    from midfill_lab.evaluation.report import comparison_tables, read_report
    from midfill_lab.evaluation.summary import compare_reports
    from midfill_lab.reporting import wide_console

    pairs = [_pair(text) for text in pair or ()]
    report, other = read_report(first), read_report(second)
    comparisons = compare_reports(report, other, pairs)
    console = wide_console()
    console.print(f"first:  {report.model}\nsecond: {other.model}", markup=False, highlight=False)
    for table in comparison_tables(comparisons).drawn():
        console.print(table)
    models = f"First: {report.model}; second: {other.model}. "
    Outputs(None, docs, section).write(comparison_tables(comparisons, models))


@app.command()
def check(humaneval: HumanEvalOption = None) -> None:
    """Run HumanEval-Infilling's reference solutions in the sandbox; all should pass."""
    import time

    from midfill.cli.progress import show_progress
    from midfill.errors import MidfillError
    from midfill_lab.evaluation.problems import HOW_TO_GET_IT, load_humaneval
    from midfill_lab.evaluation.sandbox.pool import Sandbox

    if humaneval is None:
        raise MidfillError(f"name the data with --humaneval FOLDER: {HOW_TO_GET_IT}")
    problems = load_humaneval(humaneval, "single-line")
    with Sandbox() as sandbox, show_progress() as progress:
        started = time.perf_counter()
        verdicts = sandbox.run(
            [problem.program(problem.hole) for problem in problems],
            lambda done, total: progress("programs", done, total),
        )
        seconds = time.perf_counter() - started
    failed = [
        f"{problem.id}: {verdict.reason}"
        for problem, verdict in zip(problems, verdicts, strict=True)
        if not verdict.passed
    ]
    typer.echo(
        f"{len(problems) - len(failed)} of {len(problems)} programs passed in {seconds:.1f} s,"
        f" isolation: {sandbox.isolation}"
    )
    if failed:
        raise MidfillError(f"{len(failed)} failed, first {failed[0]}")


def _pair(text: str) -> tuple[str, str]:
    """Parse two conditions such as "prefix-only=psm".

    Raises:
        typer.BadParameter: it is something else.
    """
    first, equals, second = text.partition("=")
    if not (first and equals and second):
        raise typer.BadParameter(f"--pair takes two conditions like prefix-only=psm, not {text!r}")
    return first, second
