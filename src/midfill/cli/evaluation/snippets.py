"""The command ``midfill eval snippets``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midfill.cli.evaluation.cuts import ScoreOption
from midfill.cli.evaluation.option_groups import ModelFlags, ResultFlags
from midfill.cli.evaluation.options import (
    ContextOption,
    FilesOption,
    LimitOption,
    MaxTokensOption,
    SeedOption,
    SuffixesOption,
)
from midfill.cli.evaluation.run import ChoicePage
from midfill.cli.evaluation.values import (
    parse_context,
    parse_suffixes,
)
from midfill.cli.option_groups import with_option_groups
from midfill.cli.outputs import SectionOption

if TYPE_CHECKING:
    from midfill.lab.evaluation.choice import Choice
    from midfill.lab.evaluation.run import InfillingReport

SnippetsOption = Annotated[
    str,
    typer.Option(
        help="Characters of chunks, separated by commas. /alike takes those most like the text"
        " around the caret, /old those that left the ring, /answer those most like what is missing;"
        " /behind puts them after the suffix."
    ),
]
SnippetTasksOption = Annotated[
    str,
    typer.Option(help="Kinds of holes in files, separated by commas: line, subtoken, block, span."),
]
WriteOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Write the characters into the midfill.json of this adapter's or Hugging Face model's"
        " folder.",
    ),
]


@with_option_groups
def snippets(
    *,
    files: FilesOption = None,
    suffixes: SuffixesOption = ".py",
    asked: ModelFlags,
    tasks: SnippetTasksOption = "line,subtoken",
    snippets: SnippetsOption = "0,500,1000,2000,4000,8000,2000/alike,2000/old,2000/answer",
    context_characters: ContextOption = "2000,600",
    score: ScoreOption = "similarity",
    limit: LimitOption = 100,
    seed: SeedOption = 0,
    max_tokens: MaxTokensOption = None,
    results: ResultFlags,
    section: SectionOption = "snippets",
    write: WriteOption = None,
) -> None:
    """Measure what chunks of other text are worth, and choose how many characters to show.

    Every hole is asked with chunks that an editor plugin would send there, of the same file and of
    the nearest others. Half of the files choose the fewest characters than which no more are better
    beyond doubt; the other half shows what they are worth.
    """
    from midfill.errors import MidfillError
    from midfill.lab.evaluation.choice import check_score
    from midfill.lab.evaluation.problems import parse_tasks
    from midfill.lab.evaluation.run import RunOptions, load_problems
    from midfill.lab.evaluation.snippet_choice import (
        check_tasks,
        choose_snippets,
        snippet_conditions,
    )
    from midfill.lab.evaluation.snippets import parse_snippets, with_snippets
    from midfill.lab.evaluation.source_files import read_files
    from midfill.models.checkpoints.checkpoint import SNIPPETS_KEY

    shown = parse_snippets(snippets)
    check_score(score)
    file = results.results_file()
    if not files:
        raise MidfillError("nothing to ask: name held-out source files with --files")
    if write is not None:
        asked.check_target(write, SNIPPETS_KEY)
    before, after = parse_context(context_characters)
    options = RunOptions(
        tasks=parse_tasks(tasks),
        limit=limit,
        seed=seed,
        before=before,
        after=after,
        max_tokens=max_tokens,
        suffixes=parse_suffixes(suffixes),
    )
    check_tasks(options.tasks)
    problems = load_problems(options, None, files)
    problems = with_snippets(problems, read_files(files, options.suffixes), seed)
    report = file.run(asked.open, problems, lambda model: snippet_conditions(shown), options)
    choice = choose_snippets(report, score=score)
    _page().show(report, choice, results.outputs(section), write)


def _page() -> "ChoicePage[Choice]":
    from midfill.lab.evaluation.snippet_report import (
        plot_snippets,
        snippet_markdown,
        snippet_measurement,
        snippet_tables,
    )
    from midfill.models.checkpoints.model_record import write_snippets

    def note(folder: Path, report: "InfillingReport", choice: "Choice") -> Path:
        return write_snippets(folder, int(choice.recommended), snippet_measurement(report, choice))

    return ChoicePage(snippet_tables, plot_snippets, snippet_markdown, note)
