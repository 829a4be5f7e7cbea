"""What the evaluation commands do with a run: keep its file up to date, show its results."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from midfill.cli.outputs import earlier_run

if TYPE_CHECKING:
    from rich.console import Console

    from midfill.lab.evaluation.conditions import Condition
    from midfill.lab.evaluation.models import Model
    from midfill.lab.evaluation.problems import Problem
    from midfill.lab.evaluation.report import ReportTables
    from midfill.lab.evaluation.run import InfillingReport, RunOptions
    from midfill.system.progress import Progress


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
        from midfill.lab.evaluation.report import read_report

        self._earlier = earlier_run(path, resume, read_report)

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

    def show(self, tables: "ReportTables", draw: Callable[[Path], None]) -> None:
        """Print tables, draw the plot, write the section."""

        console = results_console()
        for table in tables.drawn():
            console.print(table)
        if self.plot is not None:
            draw(self.plot)
        self.write(tables)

    def write(self, tables: "ReportTables") -> None:
        """Write the section."""
        from midfill.system.reporting import replace_section

        if self.docs is not None:
            replace_section(self.docs, self.section, tables.markdown())


def results_console() -> "Console":
    """Return standard output, wide enough for the tables if it is not a terminal."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=130)
