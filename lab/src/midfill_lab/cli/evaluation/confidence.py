"""``midfill eval confidence``: how sure a model's answers are, and from where on to show them."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from midfill.cli.option_groups import with_option_groups
from midfill_lab.cli.evaluation.options import (
    ContextOption,
    FilesOption,
    LimitOption,
    MaxTokensOption,
    ModelFlags,
    ResultFlags,
    SeedOption,
    SuffixesOption,
    UrlOption,
    parse_context,
    parse_suffixes,
)
from midfill_lab.cli.outputs import SectionOption

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from midfill.system.progress import Progress
    from midfill_lab.evaluation.models import Model

PrecisionOption = Annotated[
    float,
    typer.Option(
        min=0,
        max=100,
        help="Percent of the shown answers whose first line should be right: the threshold is the"
        " least at which it is.",
    ),
]
ThresholdOption = Annotated[
    float | None,
    typer.Option(
        min=0, max=1, help="Report this threshold instead of choosing one by --precision."
    ),
]
WriteOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Write estimators and threshold into the midfill.json of this adapter's or Hugging"
        " Face model's folder.",
    ),
]
TasksOption = Annotated[
    str, typer.Option(help="Kinds of holes, separated by commas: line, subtoken, block, span.")
]


@with_option_groups
def confidence(
    *,
    files: FilesOption = None,
    suffixes: SuffixesOption = ".py",
    asked: ModelFlags,
    url: UrlOption = None,
    tasks: TasksOption = "line",
    precision: PrecisionOption = 75.0,
    threshold: ThresholdOption = None,
    limit: LimitOption = 200,
    seed: SeedOption = 0,
    max_tokens: MaxTokensOption = None,
    context_characters: ContextOption = "2000,1000",
    results: ResultFlags,
    section: SectionOption = "confidence",
    write: WriteOption = None,
) -> None:
    """Measure how sure a model is of its answers, and from which estimate on to show them.

    As many holes are asked of each suffix as of each other. Estimators are fitted on half of the
    files and tested on the other half, and the other way round. Of a server (--url), its own
    estimates are measured.
    """
    from midfill.errors import MidfillError, OptionError
    from midfill.models.checkpoints.model_record import write_confidence
    from midfill_lab.evaluation.confidence import CONFIDENCE_CONDITION, judge
    from midfill_lab.evaluation.evaluate import RunOptions, load_problems
    from midfill_lab.evaluation.models import RemoteModel
    from midfill_lab.evaluation.problems import check_file_tasks, parse_tasks

    if not files:
        raise MidfillError("nothing to ask: name held-out source files with --files")
    if write is not None and (url is not None or threshold is not None):
        raise OptionError("--write notes what is chosen here: leave out --url and --threshold")
    if write is not None:
        asked.check_target(write, "midfill.confidence.line, .start and .threshold")
    results.earlier  # noqa: B018 - read now
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
    check_file_tasks(options.tasks, "its lines are few; confidence needs --files")
    each = [msgspec.structs.replace(options, suffixes=(suffix,)) for suffix in options.suffixes]
    problems = [problem for own in each for problem in load_problems(own, None, files)]

    def open_model(progress: "Progress") -> "AbstractContextManager[Model]":
        if url is not None:
            return nullcontext(RemoteModel(url, asked.fim_tokens))
        return asked.open(progress)

    report = results.run(open_model, problems, lambda _: [CONFIDENCE_CONDITION], options)
    found = judge(report, precision=precision, threshold=threshold)
    results.outputs(section).show(found.tables(), found.plot)
    if write is not None and found.rule is not None:
        path = write_confidence(write, found.rule, found.measurement())
        from midfill_lab.reporting import wide_console

        wide_console().print(f"written to {path}", markup=False, highlight=False)
