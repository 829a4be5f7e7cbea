"""What the evaluation commands do with a run: keep its file up to date, show its results."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from midfill.cli.evaluation.values import results_console

if TYPE_CHECKING:
    from rich.table import Table

    from midfill.lab.evaluation.conditions import Condition
    from midfill.lab.evaluation.models import Model
    from midfill.lab.evaluation.problems import Problem
    from midfill.lab.evaluation.run import InfillingReport, RunOptions
    from midfill.system.progress import Progress


C = TypeVar("C")


class ResultsFile:
    """The JSON file of a run, written as it goes on.

    Args:
        path: where; None writes none.
        resume: whether to continue the run that the file holds.

    Raises:
        MidfillError: there is no file to continue, or it is no report.
    """

    def __init__(self, path: Path | None, resume: bool) -> None:
        self._path = path
        self._earlier = _read_earlier(path) if resume else None

    def run(
        self,
        open_model: "Callable[[Progress], AbstractContextManager[Model]]",
        problems: "Sequence[Problem]",
        conditions: "Callable[[Model], Sequence[Condition]]",
        options: "RunOptions",
    ) -> "InfillingReport":
        """Ask a model all problems, and show the progress.

        Args:
            open_model: the model while it is asked.
            problems: what to ask.
            conditions: how to ask this model.
            options: what the report says of the run.
        """
        from midfill.cli.progress import show_progress
        from midfill.lab.evaluation.run import evaluate

        def save(report: "InfillingReport") -> None:
            self._write(report, finished=False)

        with show_progress() as progress, open_model(progress) as model:
            report = evaluate(
                model, problems, conditions(model), options, progress, save, self._earlier
            )
        self._write(report, finished=True)
        return report

    def _write(self, report: "InfillingReport", *, finished: bool) -> None:
        from midfill.lab.evaluation.report import write_report

        if self._path is not None:
            write_report(report, self._path, finished=finished)


@dataclass(frozen=True)
class Outputs:
    """Where results go besides the terminal.

    Attributes:
        plot: a picture; None draws none.
        docs: a Markdown file; None writes into none.
        section: the section of ``docs``.
    """

    plot: Path | None
    docs: Path | None
    section: str

    def show(
        self, tables: "Iterable[Table]", draw: Callable[[Path], None], markdown: Callable[[], str]
    ) -> None:
        """Print tables, draw the plot, write the section."""
        from midfill.system.reporting import replace_section

        console = results_console()
        for table in tables:
            console.print(table)
        if self.plot is not None:
            draw(self.plot)
        if self.docs is not None:
            replace_section(self.docs, self.section, markdown())


class ChoicePage(NamedTuple, Generic[C]):
    """How what was measured is shown, and what was chosen by it.

    Attributes:
        tables: for the terminal.
        plot: draws a picture into a file.
        markdown: for a document's section.
        note: notes the choice in a folder, and returns in which file.
    """

    tables: "Callable[[InfillingReport, C], Iterable[Table]]"
    plot: "Callable[[InfillingReport, C, Path], None]"
    markdown: "Callable[[InfillingReport, C], str]"
    note: "Callable[[Path, InfillingReport, C], Path]"

    def show(
        self,
        report: "InfillingReport",
        choice: C,
        outputs: Outputs,
        write: Path | None,
    ) -> None:
        """Show it all, and note the choice beside a model.

        Args:
            report: what was measured.
            choice: what was chosen.
            outputs: where it is shown.
            write: the model's folder; None notes it nowhere.
        """
        outputs.show(
            self.tables(report, choice),
            lambda path: self.plot(report, choice, path),
            lambda: self.markdown(report, choice),
        )
        if write is not None:
            path = self.note(write, report, choice)
            results_console().print(f"written to {path}", markup=False, highlight=False)


def _read_earlier(path: Path | None) -> "InfillingReport | None":
    """Return the report to continue; None if the run has not begun."""
    from midfill.errors import OptionError
    from midfill.lab.evaluation.report import read_report

    if path is None:
        raise OptionError("--resume continues what a file holds: name it with --json")
    return read_report(path) if path.exists() else None
