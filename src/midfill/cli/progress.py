"""Display of the progress of long work on the terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from midfill.system.progress import Progress


@contextmanager
def show_progress() -> Iterator[Progress]:
    """Show a progress bar on standard error, which disappears at the end.

    Yields:
        The function to report progress to, in bytes or steps.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from midfill.reporting.sizes import format_size

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        bar = bars.add_task("starting", total=None, amount="")

        def report(stage: str, done: int, total: int) -> None:
            in_bytes = total > 1_000_000
            amount = f"{format_size(done)} of {format_size(total)}" if in_bytes else ""
            bars.update(bar, description=stage, completed=done, total=total or None, amount=amount)

        yield report


@contextmanager
def show_steps(first: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done on standard error: in place on a terminal, else a line per step."""
    from rich.console import Console

    console = Console(stderr=True, log_path=False)
    with console.status(first) as status:
        yield status.update if console.is_terminal else console.log
