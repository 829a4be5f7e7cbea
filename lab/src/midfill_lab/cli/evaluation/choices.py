"""The commands that choose a setting for a model: ``midfill eval cuts``, windows, snippets, empty.

Each measures a run with a condition for every value of the setting, chooses one, shows what it is
worth on holes that nothing was chosen on, and with ``--write`` notes it beside the model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from midfill.cli.option_groups import with_option_groups
from midfill_lab.cli.evaluation.options import (
    ContextOption,
    FilesOption,
    HumanEvalOption,
    LimitOption,
    MaxTokensOption,
    ModelFlags,
    ResultFlags,
    SeedOption,
    SuffixesOption,
    TasksOption,
    choose_tasks,
    parse_context,
    parse_suffixes,
)
from midfill_lab.cli.outputs import SectionOption

if TYPE_CHECKING:
    from midfill_lab.evaluation.choice import MeasuredChoice
    from midfill_lab.evaluation.conditions import Condition
    from midfill_lab.evaluation.empties import EmptyChoice
    from midfill_lab.evaluation.evaluate import InfillingReport, RunOptions
    from midfill_lab.evaluation.models import Model
    from midfill_lab.evaluation.problems import Problem

ScoreOption = Annotated[
    str, typer.Option(help="The score to choose by, such as similarity, exact or stops.")
]
MarginOption = Annotated[
    float,
    typer.Option(
        min=0, max=100, help="Points below the best that the least increment may be, at most."
    ),
]
FileTasksOption = Annotated[
    str,
    typer.Option(help="Kinds of holes in files, separated by commas: line, subtoken, block, span."),
]

DistancesOption = Annotated[
    str,
    typer.Option(
        help="Characters before the caret that follow the suffix, at least, separated by commas;"
        " 'whole' is the whole prefix."
    ),
]
WindowsOption = Annotated[
    str,
    typer.Option(help="Characters before and after the caret, BEFORE/AFTER, separated by commas."),
]
ShortestOption = Annotated[
    int,
    typer.Option(
        min=1, help="Characters of the shortest file to use: windows differ in long files only."
    ),
]
SnippetsOption = Annotated[
    str,
    typer.Option(help="Characters of chunks, separated by commas."),
]
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


def _write_option(what: str) -> Any:
    return typer.Option(
        metavar="FOLDER",
        help=f"Write {what} into the midfill.json of this adapter's or Hugging Face model's"
        " folder.",
    )


WriteCutOption = Annotated[Path | None, _write_option("the least increment")]
WriteWindowOption = Annotated[Path | None, _write_option("the window")]
WriteSnippetsOption = Annotated[Path | None, _write_option("the characters")]
WriteThresholdOption = Annotated[Path | None, _write_option("the threshold")]

_Chosen = TypeVar("_Chosen", "MeasuredChoice", "EmptyChoice")


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
    write: WriteCutOption = None,
) -> None:
    """Measure quality against the cut, and choose how much text a model needs after the suffix.

    Every hole is asked with the suffix at several distances before the caret. Half of the holes
    choose the least distance that is as good as the best; the other half shows what it is worth.
    """
    from midfill.models.checkpoints.checkpoint import LEAST_INCREMENT_KEY
    from midfill.models.checkpoints.model_record import write_cut
    from midfill_lab.evaluation.choice import check_score
    from midfill_lab.evaluation.cuts import (
        choose_cut,
        cut_conditions,
        parse_distance,
        parse_distances,
    )
    from midfill_lab.evaluation.evaluate import RunOptions, load_problems

    places = parse_distances(distances)
    check_score(score)
    run = _begin(asked, results, section, write, LEAST_INCREMENT_KEY)
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
    run.choose(
        load_problems(options, humaneval, files or []),
        options,
        lambda model: cut_conditions(places, model.format),
        lambda report: choose_cut(report, score=score, margin=margin / 100),
        lambda folder, chosen: write_cut(
            folder, parse_distance(chosen.choice.recommended), chosen.measurement()
        ),
    )


@with_option_groups
def windows(
    *,
    files: FilesOption = None,
    suffixes: SuffixesOption = ".py",
    asked: ModelFlags,
    tasks: FileTasksOption = "line,block",
    windows: WindowsOption = "400/150,800/250,1200/400,2000/600,4000/1000",
    shortest: ShortestOption = 12_000,
    score: ScoreOption = "similarity",
    margin: MarginOption = 2.0,
    limit: LimitOption = 100,
    seed: SeedOption = 0,
    max_tokens: MaxTokensOption = None,
    results: ResultFlags,
    section: SectionOption = "windows",
    write: WriteWindowOption = None,
) -> None:
    """Measure quality and cost against the window, and choose how much of a document to show.

    Every hole is asked with several windows of its whole file. Half of the files choose the
    smallest window that is as good as the best; the other half shows what it is worth. The engine
    counts the tokens that it computes when a file is opened, a caret moves by a line, and a word is
    typed.
    """
    from midfill.models.checkpoints.checkpoint import WINDOW_AFTER_KEY, WINDOW_BEFORE_KEY
    from midfill.models.checkpoints.model_record import write_window
    from midfill_lab.evaluation.choice import check_score
    from midfill_lab.evaluation.evaluate import RunOptions, load_problems
    from midfill_lab.evaluation.problems import check_file_tasks, parse_tasks
    from midfill_lab.evaluation.windows import (
        choose_window,
        parse_windows,
        rule_of,
        window_conditions,
    )

    rules = parse_windows(windows)
    check_score(score)
    sources = _named_files(files)
    keys = f"{WINDOW_BEFORE_KEY} and {WINDOW_AFTER_KEY}"
    run = _begin(asked, results, section, write, keys)
    options = RunOptions(
        tasks=parse_tasks(tasks),
        limit=limit,
        seed=seed,
        max_tokens=max_tokens,
        suffixes=parse_suffixes(suffixes),
        shortest=shortest,
    )
    check_file_tasks(options.tasks, "its documents are too short; windows need --files")
    run.choose(
        load_problems(options, None, sources),
        options,
        lambda model: window_conditions(rules),
        lambda report: choose_window(report, score=score, margin=margin / 100),
        lambda folder, chosen: write_window(
            folder, rule_of(chosen.choice.recommended), chosen.measurement()
        ),
    )


@with_option_groups
def snippets(
    *,
    files: FilesOption = None,
    suffixes: SuffixesOption = ".py",
    asked: ModelFlags,
    tasks: FileTasksOption = "line,subtoken",
    snippets: SnippetsOption = "0,500,1000,2000,4000,8000",
    context_characters: ContextOption = "2000,600",
    score: ScoreOption = "similarity",
    limit: LimitOption = 100,
    seed: SeedOption = 0,
    max_tokens: MaxTokensOption = None,
    results: ResultFlags,
    section: SectionOption = "snippets",
    write: WriteSnippetsOption = None,
) -> None:
    """Measure what chunks of other text are worth, and choose how many characters to show.

    Every hole is asked with chunks that an editor plugin would send there, of the same file and of
    the nearest others. Half of the files choose the fewest characters than which no more are better
    beyond doubt; the other half shows what they are worth.
    """
    from midfill.models.checkpoints.checkpoint import SNIPPETS_KEY
    from midfill.models.checkpoints.model_record import write_snippets
    from midfill_lab.evaluation.choice import check_score
    from midfill_lab.evaluation.evaluate import RunOptions, load_problems
    from midfill_lab.evaluation.problems import check_file_tasks, parse_tasks
    from midfill_lab.evaluation.snippets import (
        choose_snippets,
        parse_snippets,
        snippet_conditions,
        with_snippets,
    )
    from midfill_lab.evaluation.source_files import read_files

    amounts = parse_snippets(snippets)
    check_score(score)
    sources = _named_files(files)
    run = _begin(asked, results, section, write, SNIPPETS_KEY)
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
    check_file_tasks(options.tasks, "its documents stand alone; snippets need --files")
    problems = load_problems(options, None, sources)
    run.choose(
        with_snippets(problems, read_files(sources, options.suffixes), seed),
        options,
        lambda model: snippet_conditions(amounts),
        lambda report: choose_snippets(report, score=score),
        lambda folder, chosen: write_snippets(
            folder, int(chosen.choice.recommended), chosen.measurement()
        ),
    )


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
    write: WriteThresholdOption = None,
) -> None:
    """Measure how probable empty answers are, and choose the threshold that decides on them.

    Carets in Python files, where it is clear whether something is missing; with --humaneval, its
    single lines too. Half of the files and functions choose the smallest threshold that loses few
    answers where something is missing; the other half shows what it is worth.
    """
    from midfill.errors import OptionError
    from midfill.models.checkpoints.checkpoint import EMPTY_THRESHOLD_KEY
    from midfill.models.checkpoints.model_record import write_empty
    from midfill_lab.evaluation.empties import (
        caret_tasks,
        choose_empty,
        empty_conditions,
        given_empty,
    )
    from midfill_lab.evaluation.evaluate import RunOptions, load_problems

    sources = _named_files(files, "Python")
    if write is not None and threshold is not None:
        raise OptionError("--write notes a threshold that is chosen: leave out --threshold")
    run = _begin(asked, results, section, write, EMPTY_THRESHOLD_KEY)
    before, after = parse_context(context_characters)
    options = RunOptions(
        tasks=caret_tasks(humaneval is not None),
        limit=limit,
        seed=seed,
        before=before,
        after=after,
        max_tokens=max_tokens,
    )

    def choose(report: "InfillingReport") -> "EmptyChoice":
        if threshold is not None:
            return given_empty(report, threshold)
        return choose_empty(report, limit=most / 100)

    run.choose(
        load_problems(options, humaneval, sources),
        options,
        lambda model: empty_conditions(model.format),
        choose,
        lambda folder, chosen: write_empty(folder, chosen.threshold, chosen.measurement()),
    )


@dataclass(frozen=True)
class _Run:
    """What the commands have in common.

    Attributes:
        asked: the model.
        results: where results are kept during the run, and shown.
        section: the section of a document for them.
        write: the folder to note the choice in; None notes it nowhere.
    """

    asked: ModelFlags
    results: ResultFlags
    section: str
    write: Path | None

    def choose(
        self,
        problems: "Sequence[Problem]",
        options: "RunOptions",
        conditions: "Callable[[Model], Sequence[Condition]]",
        choose: "Callable[[InfillingReport], _Chosen]",
        note: "Callable[[Path, _Chosen], Path]",
    ) -> None:
        """Measure, choose, show the choice, and note it beside the model.

        Args:
            problems, options, conditions: see ``ResultFlags.run``.
            choose: chooses by what was measured.
            note: notes the choice in a folder, and returns in which file.
        """
        report = self.results.run(self.asked.open, problems, conditions, options)
        chosen = choose(report)
        self.results.outputs(self.section).show(chosen.tables(), chosen.plot)
        if self.write is not None:
            path = note(self.write, chosen)
            from midfill_lab.reporting import wide_console

            wide_console().print(f"written to {path}", markup=False, highlight=False)


def _begin(
    asked: ModelFlags, results: ResultFlags, section: str, write: Path | None, keys: str
) -> _Run:
    """Check what can be checked before the work.

    Args:
        asked, results, section, write: options of the command.
        keys: what a GGUF file may have instead of the noted choice, for an error.

    Raises:
        MidfillError: results to continue can't be read, or the choice can't be noted.
    """
    results.earlier  # noqa: B018 - read now
    if write is not None:
        asked.check_target(write, keys)
    return _Run(asked, results, section, write)


def _named_files(files: list[Path] | None, language: str = "source") -> list[Path]:
    """Return the files to ask about.

    Raises:
        MidfillError: there are none.
    """
    from midfill.errors import MidfillError

    if not files:
        raise MidfillError(f"nothing to ask: name held-out {language} files with --files")
    return files
