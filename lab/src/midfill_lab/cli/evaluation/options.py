"""Options of the ``midfill eval`` commands, groups of them, and their values."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midfill.cli.options import (
    AdapterOption,
    BackendOption,
    DeviceOption,
    FimTokensOption,
    ModelOption,
    ThreadsOption,
    WeightsFormatOption,
)
from midfill.cli.values import parse_method
from midfill.config import KVCacheDtypeName
from midfill.infill.candidates import MAX_CANDIDATES
from midfill_lab.cli.outputs import DocsOption, Outputs, PlotOption, earlier_run, writable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from midfill.system.progress import Progress
    from midfill_lab.evaluation.conditions import Condition
    from midfill_lab.evaluation.evaluate import InfillingReport, RunOptions
    from midfill_lab.evaluation.models import Model, ModelChoice
    from midfill_lab.evaluation.problems import Problem, Task

HumanEvalOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="HumanEval-Infilling: the 'data' folder of OpenAI's human-eval-infilling repository.",
    ),
]
FilesOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="PATH",
        help="Source files, or folders of them, that the model hasn't seen; repeatable.",
    ),
]
SuffixesOption = Annotated[
    str,
    typer.Option(
        metavar="SUFFIXES",
        help="Suffixes of the files to take from folders, separated by commas, such as .js.",
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        help="Ask an OpenAI-style server instead, such as http://127.0.0.1:8080/v1; prompts are"
        " laid out here, with --fim-tokens."
    ),
]
TasksOption = Annotated[
    str | None,
    typer.Option(
        help="Kinds of holes, separated by commas: single-line, multi-line, random-span"
        " (HumanEval), line, subtoken, block, span, nothing (files). By default all there is data"
        " for."
    ),
]
ConditionsOption = Annotated[
    str | None,
    typer.Option(
        help="Ways of asking, separated by commas: prefix-only, prefix-only+healing, psm, spm,"
        " efim, efim+healing, auto. By default all that apply to the model."
    ),
]
MethodsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        parser=parse_method,
        metavar="NAME[:OPTION=VALUE,...]",
        help="Ask once more with the prompts' KV compressed, as in cake:budget=256; repeatable. A"
        " server must allow it. With it, --conditions is auto by default.",
    ),
]
CandidatesOption = Annotated[
    int,
    typer.Option(
        min=1, max=MAX_CANDIDATES,
        help="Ask once more, laid out by midfill, with so many answers tried where the model is"
        " undecided. With it, --conditions is auto by default.",
    ),
]  # fmt: skip
LimitOption = Annotated[
    int, typer.Option(min=0, help="Maximum holes per kind; 0 takes all (of files, a thousand).")
]
SeedOption = Annotated[int, typer.Option(help="Seed of all randomness.")]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Maximum tokens per answer; by default 64 in a line, 256 for multi-line, else 128.",
    ),
]
ContextOption = Annotated[
    str,
    typer.Option(metavar="BEFORE,AFTER", help="Maximum context around a hole."),
]
TypedOption = Annotated[
    bool,
    typer.Option(
        "--typed",
        help="Tokenise the last 40 characters after the middle token in fragments of 1 to 8, as"
        " if typed.",
    ),
]
JsonOption = Annotated[
    Path | None,
    typer.Option(
        callback=writable,
        help="Write every answer and score to this file, for 'eval compare'; updated during the"
        " run.",
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue the run in --json with the same options: ask only what it lacks.",
    ),
]
ProcessesOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Copies of the model, each in a process with its share of the threads: faster where"
        " other programs keep the machine busy.",
    ),
]


@dataclass(frozen=True)
class ModelFlags:
    """Which model to ask, and how to run it; the fields are ``ModelChoice``'s."""

    model: ModelOption = None
    adapter: AdapterOption = None
    fim_tokens: FimTokensOption = None
    weights: WeightsFormatOption = "auto"
    backend: BackendOption = "auto"
    device: DeviceOption = None
    threads: ThreadsOption = None
    processes: ProcessesOption = 1

    def choice(self, kv_cache_dtype: KVCacheDtypeName = "auto") -> "ModelChoice":
        """Return the model to ask, the default one if none is named."""
        from midfill.models.checkpoints.model_store import DEFAULT_MODEL
        from midfill_lab.evaluation.models import ModelChoice

        options = {
            **vars(self),
            "model": self.model or DEFAULT_MODEL,
            "kv_cache_dtype": kv_cache_dtype,
        }
        return ModelChoice(**options)

    def open(
        self, progress: "Progress", kv_cache_dtype: KVCacheDtypeName = "auto"
    ) -> "AbstractContextManager[Model]":
        """Load the model."""
        from midfill_lab.evaluation.models import load_model

        return load_model(self.choice(kv_cache_dtype), progress)

    def check_target(self, folder: Path, keys: str) -> None:
        """Check before the work that what is measured can be noted in a folder.

        Args:
            folder: the folder.
            keys: what a GGUF file may have instead, for the error.

        Raises:
            MidfillError: it is no model's or adapter's folder, or another one's.
        """
        from midfill.errors import OptionError
        from midfill.models.checkpoints.model_record import check_folder
        from midfill.models.checkpoints.model_store import resolve, resolve_adapter

        check_folder(folder, keys)
        model = self.choice().model
        measured = resolve_adapter(model, self.adapter) or resolve(model)
        if folder.resolve() != measured.resolve():
            raise OptionError(f"--write {folder}: what is measured is {measured}; name that folder")


@dataclass(frozen=True)
class ResultFlags:
    """Where the results of a run go."""

    json: JsonOption = None
    resume: ResumeOption = False
    plot: PlotOption = None
    docs: DocsOption = None

    @cached_property
    def earlier(self) -> "InfillingReport | None":
        """The run to continue, to be read before the work; None if there is none.

        Raises:
            MidfillError: no file is named, or it is no report.
        """
        from midfill_lab.evaluation.report import read_report

        return earlier_run(self.json, self.resume, read_report)

    def run(
        self,
        open_model: "Callable[[Progress], AbstractContextManager[Model]]",
        problems: "Sequence[Problem]",
        conditions: "Callable[[Model], Sequence[Condition]]",
        options: "RunOptions",
    ) -> "InfillingReport":
        """Ask a model all problems; show the progress, and write the file as it goes on.

        Args:
            open_model: the model while it is asked.
            problems: what to ask.
            conditions: how to ask this model.
            options: what the report says of the run.
        """
        from midfill.cli.progress import show_progress
        from midfill_lab.evaluation.evaluate import evaluate
        from midfill_lab.evaluation.report import write_report

        def save(report: "InfillingReport", *, finished: bool = False) -> None:
            if self.json is not None:
                write_report(report, self.json, finished=finished)

        with show_progress() as progress, open_model(progress) as model:
            report = evaluate(
                model, problems, conditions(model), options, progress, save, self.earlier
            )
        save(report, finished=True)
        return report

    def outputs(self, section: str) -> Outputs:
        """Return where results go at the end."""
        return Outputs(self.plot, self.docs, section)


def choose_tasks(
    text: str | None, humaneval: Path | None, files: list[Path], *, holes_only: bool = False
) -> "tuple[Task, ...]":
    """Return the named tasks, or all that there is data for.

    Args:
        text: names of tasks, if given.
        humaneval, files: the data.
        holes_only: leave out the tasks that are not about filling holes at usual places.
    """
    from midfill.errors import MidfillError
    from midfill_lab.evaluation.problems import (
        FILE_TASKS,
        HOLE_TASKS,
        HOW_TO_GET_IT,
        PUBLIC_TASKS,
        parse_tasks,
    )

    if humaneval is None and not files:
        raise MidfillError(
            "nothing to ask: name held-out source files with --files, or HumanEval-Infilling with"
            f" --humaneval FOLDER; for that, {HOW_TO_GET_IT}"
        )
    if text is not None:
        return parse_tasks(text)
    known = (*(PUBLIC_TASKS if humaneval is not None else ()), *(FILE_TASKS if files else ()))
    return tuple(task for task in known if task in HOLE_TASKS or not holes_only)


def parse_suffixes(text: str) -> tuple[str, ...]:
    """Parse suffixes such as ".js,.mjs".

    Raises:
        typer.BadParameter: one of them has no dot, or there is none.
    """
    suffixes = tuple(part.strip() for part in text.split(",") if part.strip())
    if not suffixes or not all(part.startswith(".") and len(part) > 1 for part in suffixes):
        raise typer.BadParameter("--suffixes takes suffixes with their dots, like .js,.mjs")
    return suffixes


def parse_context(text: str) -> tuple[int, int]:
    """Parse two numbers of characters such as "2000,1000".

    Raises:
        typer.BadParameter: it is something else.
    """
    try:
        before, after = (int(part) for part in text.split(","))
    except ValueError:
        before = after = -1
    if before < 1 or after < 0:
        raise typer.BadParameter("--context-characters takes two numbers like 2000,1000")
    return before, after
