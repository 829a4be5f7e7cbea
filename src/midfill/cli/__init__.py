"""The command line. Each command has a file here; heavy imports wait until a command runs."""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType


def main() -> None:
    """Run the command line; an error becomes one line on standard error."""
    if sys.argv[1:2] in (["serve"], ["gateway"]):
        _take_early_signals()
    from midfill.system.process import without_collections

    with without_collections():
        if sys.argv[1:2] == ["serve"]:
            from midfill.cli.serve import app
        else:
            from midfill.cli.app import app

    sys.exit(run(app))


def _take_early_signals() -> None:
    """Take the signals that a server may get before it has handlers of its own.

    Without a handler, SIGTERM would end it by the signal, or not at all if it is a container's
    first process.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os._exit(128 + number)  # nothing has been started that would have to be ended

    signal.signal(signal.SIGTERM, end)
    if hasattr(signal, "SIGHUP"):  # Windows has none
        # Until a server reads its files again at a hangup, it has read none that could be old.
        signal.signal(signal.SIGHUP, lambda *_: None)


def run(app: Callable[[], object]) -> int:
    """Run a command line; return its exit status."""
    from midfill.errors import MidfillError, OptionError

    try:
        app()
    except MidfillError as error:
        sys.stderr.write(f"midfill: {error}\n")
        return 2 if isinstance(error, OptionError) else 1
    return 0
