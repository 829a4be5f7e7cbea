"""Options that name files for results. A file that can't be written is refused before the work."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from midfill.errors import MidfillError, OptionError
from midfill.system.extras import require

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
    if path is not None:
        require("--plot", ["matplotlib"], extra="bench")
        if path.suffix not in _PLOT_ENDINGS:
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
