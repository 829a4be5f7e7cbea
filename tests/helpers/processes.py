"""Processes in tests: signal handling of their own, and waiting for what they do."""

import signal
import time
from collections.abc import Callable
from pathlib import Path


def default_interrupt() -> None:
    """Let SIGINT end the calling process, even if its parent ignores it as under nohup.

    For ``preexec_fn`` of ``subprocess.Popen``: an ignored signal stays ignored in children.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ignored_interrupt() -> None:
    """Ignore SIGINT in the calling process, as a shell does for commands in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def is_running(process_id: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until a condition holds; fail if it does not within ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"the condition did not hold within {seconds:g} s")
        time.sleep(0.02)
