"""Display of the progress of long work on the terminal."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from midfill.system.progress import STAGES_VARIABLE, Progress, stage_lines

_LINE_SECONDS = 10.0


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def show_progress(write: Callable[[str], None] = _print_line) -> Iterator[Progress]:
    """Show a progress bar on standard error, which disappears at the end.

    Where that is no terminal, write a line from time to time, so that a log shows why a large
    model isn't ready yet; a program that has started this one can have it on standard output.

    Args:
        write: writes such a line; a server logs it, in the format of its log.

    Yields:
        The function to report progress to, in bytes or steps.
    """
    if STAGES_VARIABLE in os.environ:
        yield stage_lines(partial(print, flush=True))
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield progress_lines(write)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from midfill.system.machine import format_size

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("starting", total=None, amount="")

        def report(stage: str, done: int, total: int) -> None:
            in_bytes = total > 1_000_000
            amount = f"{format_size(done)} of {format_size(total)}" if in_bytes else ""
            bars.update(bar, description=stage, completed=done, total=total or None, amount=amount)

        yield report


def progress_lines(
    write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Progress:
    """Return a progress callback that writes a line at most every 10 seconds, and none before."""
    last = clock()

    def report(stage: str, done: int, total: int) -> None:
        nonlocal last
        if clock() - last >= _LINE_SECONDS:
            last = clock()
            write(f"{stage}: {done / total:.0%}" if total else stage)

    return report


@contextmanager
def show_steps(first: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done on standard error: in place on a terminal, else a line per step."""
    from rich.console import Console

    console = Console(stderr=True, log_path=False)
    with console.status(first) as status:
        yield status.update if console.is_terminal else console.log
