"""The command ``midfill eval empty``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midfill.cli.evaluation.option_groups import ModelFlags, ResultFlags
from midfill.cli.evaluation.options import (
    ContextOption,
    FilesOption,
    HumanEvalOption,
    LimitOption,
    MaxTokensOption,
    SeedOption,
)
from midfill.cli.evaluation.run import ChoicePage
from midfill.cli.evaluation.values import (
    parse_context,
)
from midfill.cli.option_groups import with_option_groups
from midfill.cli.outputs import SectionOption

if TYPE_CHECKING:
    from midfill.lab.evaluation.empties import EmptyChoice
    from midfill.lab.evaluation.run import InfillingReport

MostOption = Annotated[
    float,
    typer.Option(
        min=0,
        max=100,
        help="Percent of the answers where something is missing that the threshold may lose: make"
        " empty though they would have text.",
    ),
]
ThresholdOption = Annotated[
    float | None,
    typer.Option(
        min=0, max=1, help="Report this threshold on all carets, instead of choosing one on half."
    ),
]
WriteOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Write the threshold into the midfill.json of this adapter's or Hugging Face model's"
        " folder.",
    ),
]


@with_option_groups
def empty(
    *,
    files: FilesOption = None,
    humaneval: HumanEvalOption = None,
    asked: ModelFlags,
    most: MostOption = 4.0,
    threshold: ThresholdOption = None,
    limit: LimitOption = 200,
    seed: SeedOption = 0,
    max_tokens: MaxTokensOption = None,
    context_characters: ContextOption = "2000,1000",
    results: ResultFlags,
    section: SectionOption = "empty",
    write: WriteOption = None,
) -> None:
    """Measure how probable empty answers are, and choose the threshold that decides on them.

    Carets in Python files, where it is clear whether something is missing; with --humaneval, its
    single lines too. Half of the files and functions choose the smallest threshold that loses few
    answers where something is missing; the other half shows what it is worth.
    """
    from midfill.errors import MidfillError, OptionError
    from midfill.lab.evaluation.empties import (
        caret_tasks,
        choose_empty,
        empty_conditions,
        given_empty,
    )
    from midfill.lab.evaluation.run import RunOptions, load_problems
    from midfill.models.checkpoints.checkpoint import EMPTY_THRESHOLD_KEY

    file = results.results_file()
    if not files:
        raise MidfillError("nothing to ask: name held-out Python files with --files")
    if write is not None and threshold is not None:
        raise OptionError("--write notes a threshold that is chosen: leave out --threshold")
    if write is not None:
        asked.check_target(write, EMPTY_THRESHOLD_KEY)
    before, after = parse_context(context_characters)
    options = RunOptions(
        tasks=caret_tasks(humaneval is not None),
        limit=limit,
        seed=seed,
        before=before,
        after=after,
        max_tokens=max_tokens,
    )
    problems = load_problems(options, humaneval, files)
    report = file.run(asked.open, problems, lambda model: empty_conditions(model.format), options)
    choice = (
        choose_empty(report, limit=most / 100)
        if threshold is None
        else given_empty(report, threshold)
    )
    _page().show(report, choice, results.outputs(section), write)


def _page() -> "ChoicePage[EmptyChoice]":
    from midfill.lab.evaluation.empties import (
        empty_markdown,
        empty_measurement,
        empty_tables,
        plot_empty,
    )
    from midfill.models.checkpoints.model_record import write_empty

    def note(folder: Path, report: "InfillingReport", choice: "EmptyChoice") -> Path:
        return write_empty(folder, choice.threshold, empty_measurement(report, choice))

    return ChoicePage(empty_tables, plot_empty, empty_markdown, note)
