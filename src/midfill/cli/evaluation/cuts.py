"""The command ``midfill eval cuts``."""

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
    SuffixesOption,
    TasksOption,
)
from midfill.cli.evaluation.run import ChoicePage
from midfill.cli.evaluation.values import (
    choose_tasks,
    parse_context,
    parse_suffixes,
)
from midfill.cli.option_groups import with_option_groups
from midfill.cli.outputs import SectionOption

if TYPE_CHECKING:
    from midfill.lab.evaluation.choice import Choice
    from midfill.lab.evaluation.run import InfillingReport

DistancesOption = Annotated[
    str,
    typer.Option(
        help="Characters before the caret that follow the suffix, at least, separated by commas;"
        " 'whole' is the whole prefix."
    ),
]
ScoreOption = Annotated[
    str, typer.Option(help="The score to choose by, such as similarity, exact or stops.")
]
MarginOption = Annotated[
    float,
    typer.Option(
        min=0, max=100, help="Points below the best that the least increment may be, at most."
    ),
]
WriteOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Write the least increment into the midfill.json of this adapter's or Hugging Face"
        " model's folder.",
    ),
]


@with_option_groups
def cuts(
    *,
    humaneval: HumanEvalOption = None,
    files: FilesOption = None,
    asked: ModelFlags,
    tasks: TasksOption = None,
    distances: DistancesOption = "0,32,96,200,400,800,whole",
    score: ScoreOption = "similarity",
    margin: MarginOption = 2.0,
    limit: LimitOption = 200,
    seed: SeedOption = 0,
    max_tokens: MaxTokensOption = None,
    suffixes: SuffixesOption = ".py",
    context_characters: ContextOption = "2000,1000",
    results: ResultFlags,
    section: SectionOption = "cuts",
    write: WriteOption = None,
) -> None:
    """Measure quality against the cut, and choose how much text a model needs after the suffix.

    Every hole is asked with the suffix at several distances before the caret. Half of the holes
    choose the least distance that is as good as the best; the other half shows what it is worth.
    """
    from midfill.lab.evaluation.choice import check_score
    from midfill.lab.evaluation.cuts import (
        choose_cut,
        cut_conditions,
        parse_distances,
    )
    from midfill.lab.evaluation.run import RunOptions, load_problems
    from midfill.models.checkpoints.checkpoint import LEAST_INCREMENT_KEY

    places = parse_distances(distances)
    check_score(score)
    file = results.results_file()
    if write is not None:
        asked.check_target(write, LEAST_INCREMENT_KEY)
    before, after = parse_context(context_characters)
    options = RunOptions(
        tasks=choose_tasks(tasks, humaneval, files or [], holes_only=True),
        limit=limit,
        seed=seed,
        before=before,
        after=after,
        max_tokens=max_tokens,
        suffixes=parse_suffixes(suffixes),
    )
    problems = load_problems(options, humaneval, files or [])
    report = file.run(
        asked.open, problems, lambda model: cut_conditions(places, model.format), options
    )
    choice = choose_cut(report, score=score, margin=margin / 100)
    _page().show(report, choice, results.outputs(section), write)


def _page() -> "ChoicePage[Choice]":
    from midfill.lab.evaluation.cuts import (
        cut_markdown,
        cut_measurement,
        cut_tables,
        parse_distance,
        plot_cuts,
    )
    from midfill.models.checkpoints.model_record import write_cut

    def note(folder: Path, report: "InfillingReport", choice: "Choice") -> Path:
        return write_cut(
            folder, parse_distance(choice.recommended), cut_measurement(report, choice)
        )

    return ChoicePage(cut_tables, plot_cuts, cut_markdown, note)
