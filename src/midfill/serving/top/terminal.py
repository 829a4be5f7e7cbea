"""The loop of ``midfill top``: read, show, wait for a key; until the user has seen enough."""

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live

from midfill.serving.top.display import display
from midfill.serving.top.history import History
from midfill.serving.top.snapshot import ServerGoneError, Snapshot

Read = Callable[[], Snapshot]

_SPAN = 10.0  # seconds that rates and percentiles are of
_REDRAW_SECONDS = 0.5  # until a terminal that has another size is redrawn


def show_once(read: Read, url: str, interval: float, console: Console) -> None:
    """Print the numbers once; rates are of ``interval`` seconds.

    Raises:
        ServerGoneError: no server answers.
    """
    history = History(interval)
    history.add(read())
    time.sleep(interval)
    history.add(read())
    console.print(display(history, url, console.width))


def show_live(read: Read, url: str, interval: float, console: Console) -> None:
    """Show the numbers until the user presses q or Ctrl-C. A server may end and come back.

    Raises:
        ServerGoneError: no server answers at first.
    """
    history = History(_SPAN)
    history.add(read())
    with (
        contextlib.suppress(KeyboardInterrupt),
        _single_keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        notice: str | None = None
        while True:
            live.update(display(history, url, console.width, notice), refresh=True)
            due, size = time.monotonic() + interval, console.size
            while (left := due - time.monotonic()) > 0 and console.size == size:
                if "q" in pressed(min(left, _REDRAW_SECONDS)).lower():
                    return
            if time.monotonic() < due:
                continue
            try:
                snapshot = read()
            except ServerGoneError:
                notice = "the server doesn't answer; these are its last numbers"
                continue
            if notice is not None:  # what comes now may be another process
                notice, history = None, History(_SPAN)
            history.add(snapshot)


@contextlib.contextmanager
def _single_keys() -> Iterator[Callable[[float], str]]:
    """Have each key arrive when it is pressed; yield a function that waits for one.

    The function takes the seconds to wait, and returns what was pressed, "" for nothing. Where
    single keys can't be read, as on Windows or if standard input is no terminal, it only waits.
    """
    try:
        import termios
        import tty

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (ImportError, OSError, ValueError, termios.error):
        yield _only_wait
        return

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        if not ready:
            return ""
        return os.read(descriptor, 64).decode("ascii", "ignore") or "q"  # the terminal is gone

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _only_wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""
