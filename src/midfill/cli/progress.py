"""Progress of long work on the terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from midfill.system.progress import Progress


@contextmanager
def show_progress() -> Iterator[Progress]:
    """A bar on standard error that hears (what, done, total), bytes or steps; gone at the end."""
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

        def tell(what: str, done: int, total: int) -> None:
            in_bytes = total > 1_000_000
            amount = f"{format_size(done)} of {format_size(total)}" if in_bytes else ""
            bars.update(bar, description=what, completed=done, total=total or None, amount=amount)

        yield tell


@contextmanager
def show_steps(first: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done on standard error: in place on a terminal, else a line per step."""
    from rich.console import Console

    console = Console(stderr=True, log_path=False)
    with console.status(first) as status:
        yield status.update if console.is_terminal else console.log
