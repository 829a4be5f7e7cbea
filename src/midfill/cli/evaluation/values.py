"""Values of the options of ``midfill eval``, and where it prints."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from midfill.lab.evaluation.problems import Task


def results_console() -> "Console":
    """Return standard output, wide enough for the tables if it is not a terminal."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=130)


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
    from midfill.lab.evaluation.problems import (
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
