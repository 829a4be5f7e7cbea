"""Display of the progress of long work on the terminal."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from midfill.system.progress import STAGES_VARIABLE, NotedProgress, stage_lines

_QUIET_SECONDS = 2.0
"""What takes no longer, as most starts, needs no lines."""
_MIN_STAGE_SECONDS = 0.3
_LINE_SECONDS = 5.0
_TICK_SECONDS = 0.25
_MIN_SHOWN_BYTES = 1_000_000  # steps are fewer


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def show_progress(write: Callable[[str], None] = _print_line) -> Iterator[NotedProgress]:
    """Show a progress bar on standard error, which disappears at the end.

    Where that is no terminal, write lines, so that a log shows why a model isn't ready yet, see
    ``StageLog``; a program that has started this one can have them on standard output.

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
        log = StageLog(write)
        with _ticking(log):
            yield log.report
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        shown, bar = "starting", bars.add_task("starting", total=None, amount="")

        def report(stage: str, done: int, total: int, note: str = "", /) -> None:
            nonlocal shown, bar
            amount = note or _amount(done, total)
            if stage != shown:
                bars.remove_task(bar)
                # A bar without a total moves: of a single step, no share is known.
                whole = total if total > 1 else None
                shown, bar = stage, bars.add_task(stage, total=whole, amount=amount)
            bars.update(bar, completed=done, total=total if total > 1 else None, amount=amount)

        yield report


def _amount(done: int, total: int) -> str:
    """Return how much is done in words, "" where it isn't counted in bytes."""
    from midfill.system.machine import format_size

    return f"{format_size(done)} of {format_size(total)}" if total > _MIN_SHOWN_BYTES else ""


class StageLog:
    """Lines about the stages of long work, for a log: one as a stage begins, then every 5 seconds.

    The first two seconds are silent, so that work that is soon done leaves no lines, and stages
    that are over at once are left out. ``tick`` has to be called from time to time: some stages
    report nothing between their beginning and end.

    Args:
        write: writes a line.
        clock: returns seconds since any moment.
    """

    def __init__(
        self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write
        self._clock = clock
        self._lock = threading.Lock()
        self._stage, self._done, self._total, self._note = "", 0, 0, ""
        self._began = clock()
        self._due = self._quiet_until = self._began + _QUIET_SECONDS

    def report(self, stage: str, done: int, total: int, note: str = "", /) -> None:
        """Note what is being done, and write the line that is due; see ``NotedProgress``."""
        with self._lock:
            now = self._clock()
            if stage != self._stage:
                self._began = now
                self._due = max(now + _MIN_STAGE_SECONDS, self._quiet_until)
            elif total and not self._total:  # now it is known how much is to be done
                self._due = max(now, self._quiet_until)
            self._stage, self._done, self._total, self._note = stage, done, total, note
            self._write_if_due(now)

    def tick(self) -> None:
        """Write the line that is due, if one is."""
        with self._lock:
            self._write_if_due(self._clock())

    def _write_if_due(self, now: float) -> None:
        if now >= self._due and self._stage:
            self._due = now + _LINE_SECONDS
            self._write(self._line(now - self._began))

    def _line(self, seconds: float) -> str:
        if amount := self._note or _amount(self._done, self._total):
            return f"{self._stage}: {amount}"
        if self._total > 1:
            return f"{self._stage}: {self._done / self._total:.0%}"
        return f"{self._stage}: {seconds:.0f} s" if seconds >= 1 else self._stage


@contextmanager
def _ticking(log: StageLog) -> Iterator[None]:
    """Call ``tick`` regularly on a thread of its own, within the block."""
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(_TICK_SECONDS):
            log.tick()

    thread = threading.Thread(target=tick, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def show_steps(first: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done on standard error: in place on a terminal, else a line per step."""
    from rich.console import Console

    console = Console(stderr=True, log_path=False)
    with console.status(first) as status:
        yield status.update if console.is_terminal else console.log
