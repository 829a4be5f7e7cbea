"""Where results go: options that name files, refused before the work if they can't be written."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from midfill.errors import MidfillError, OptionError

if TYPE_CHECKING:
    from midfill_lab.evaluation.report import ReportTables

T = TypeVar("T")

_PLOT_ENDINGS = (".png", ".svg", ".pdf")


def writable(path: Path | None) -> Path | None:
    """Check a file to write; the callback of an option.

    Raises:
        MidfillError: there can be no such file.
    """
    if path is not None:
        if path.is_dir():
            raise MidfillError(f"{path} can't be written: it is a folder")
        if not path.absolute().parent.is_dir():
            raise MidfillError(f"{path} can't be written: there is no folder {path.parent}")
    return path


def _drawable(path: Path | None) -> Path | None:
    if path is not None and path.suffix not in _PLOT_ENDINGS:
        raise OptionError(f"--plot {path}: the name must end in .png, .svg or .pdf")
    return writable(path)


def earlier_run(json: Path | None, resume: bool, read: Callable[[Path], T]) -> T | None:
    """Return what the file named by ``--json`` holds of a run to continue; None if it has none.

    Args:
        json: the file.
        resume: whether a run is to be continued.
        read: reads such a file.

    Raises:
        MidfillError: no file is named, or it holds something else.
    """
    if not resume:
        return None
    if json is None:
        raise OptionError("--resume continues what a file holds: name it with --json")
    return read(json) if json.exists() else None


PlotOption = Annotated[
    Path | None,
    typer.Option(callback=_drawable, help="Write a plot to this file (.png, .svg, .pdf)."),
]
DocsOption = Annotated[
    Path | None,
    typer.Option(callback=writable, help="Write the tables into this Markdown file."),
]
SectionOption = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="The section for them, between <!-- NAME --> and <!-- /NAME -->."
    ),
]


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
        from midfill_lab.reporting import wide_console

        console = wide_console()
        for table in tables.drawn():
            console.print(table)
        if self.plot is not None:
            draw(self.plot)
        self.write(tables)

    def write(self, tables: "ReportTables") -> None:
        """Write the section."""
        from midfill_lab.reporting import replace_section

        if self.docs is not None:
            replace_section(self.docs, self.section, tables.markdown())
