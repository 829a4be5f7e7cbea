"""The command ``midfill eval windows``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midfill.cli.evaluation.cuts import MarginOption, ScoreOption
from midfill.cli.evaluation.option_groups import ModelFlags, ResultFlags
from midfill.cli.evaluation.options import (
    FilesOption,
    LimitOption,
    MaxTokensOption,
    SeedOption,
    SuffixesOption,
)
from midfill.cli.evaluation.run import ChoicePage
from midfill.cli.evaluation.values import (
    parse_suffixes,
)
from midfill.cli.option_groups import with_option_groups
from midfill.cli.outputs import SectionOption

if TYPE_CHECKING:
    from midfill.lab.evaluation.choice import Choice
    from midfill.lab.evaluation.run import InfillingReport

WindowsOption = Annotated[
    str,
    typer.Option(help="Characters before and after the caret, BEFORE/AFTER, separated by commas."),
]
WindowTasksOption = Annotated[
    str,
    typer.Option(help="Kinds of holes in files, separated by commas: line, subtoken, block, span."),
]
ShortestOption = Annotated[
    int,
    typer.Option(
        min=1, help="Characters of the shortest file to use: windows differ in long files only."
    ),
]
WriteOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Write the window into the midfill.json of this adapter's or Hugging Face model's"
        " folder.",
    ),
]


@with_option_groups
def windows(
    *,
    files: FilesOption = None,
    suffixes: SuffixesOption = ".py",
    asked: ModelFlags,
    tasks: WindowTasksOption = "line,block",
    windows: WindowsOption = "400/150,800/250,1200/400,2000/600,4000/1000",
    shortest: ShortestOption = 12_000,
    score: ScoreOption = "similarity",
    margin: MarginOption = 2.0,
    limit: LimitOption = 100,
    seed: SeedOption = 0,
    max_tokens: MaxTokensOption = None,
    results: ResultFlags,
    section: SectionOption = "windows",
    write: WriteOption = None,
) -> None:
    """Measure quality and cost against the window, and choose how much of a document to show.

    Every hole is asked with several windows of its whole file. Half of the files choose the
    smallest window that is as good as the best; the other half shows what it is worth. The engine
    counts the tokens that it computes when a file is opened, a caret moves by a line, and a word is
    typed.
    """
    from midfill.errors import MidfillError
    from midfill.lab.evaluation.choice import check_score
    from midfill.lab.evaluation.problems import parse_tasks
    from midfill.lab.evaluation.run import RunOptions, load_problems
    from midfill.lab.evaluation.windows import (
        check_tasks,
        choose_window,
        parse_windows,
        window_conditions,
    )
    from midfill.models.checkpoints.checkpoint import WINDOW_AFTER_KEY, WINDOW_BEFORE_KEY

    rules = parse_windows(windows)
    check_score(score)
    file = results.results_file()
    if not files:
        raise MidfillError("nothing to ask: name held-out source files with --files")
    if write is not None:
        keys = f"{WINDOW_BEFORE_KEY} and {WINDOW_AFTER_KEY}"
        asked.check_target(write, keys)
    options = RunOptions(
        tasks=parse_tasks(tasks),
        limit=limit,
        seed=seed,
        max_tokens=max_tokens,
        suffixes=parse_suffixes(suffixes),
        shortest=shortest,
    )
    check_tasks(options.tasks)
    problems = load_problems(options, None, files)
    report = file.run(asked.open, problems, lambda model: window_conditions(rules), options)
    choice = choose_window(report, score=score, margin=margin / 100)
    _page().show(report, choice, results.outputs(section), write)


def _page() -> "ChoicePage[Choice]":
    from midfill.lab.evaluation.windows import (
        plot_windows,
        rule_of,
        window_markdown,
        window_measurement,
        window_tables,
    )
    from midfill.models.checkpoints.model_record import write_window

    def note(folder: Path, report: "InfillingReport", choice: "Choice") -> Path:
        return write_window(folder, rule_of(choice.recommended), window_measurement(report, choice))

    return ChoicePage(window_tables, plot_windows, window_markdown, note)
