"""start_in_background: work that nobody waits for, on a thread that others come before."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

_NICENESS = 10


def start_in_background(work: Callable[[], None], name: str) -> threading.Thread:
    """Do work on a new thread of low priority; the interpreter waits for it when it ends.

    Args:
        work: logs its own errors.
        name: of the thread.
    """

    def run() -> None:
        if sys.platform == "linux":  # elsewhere a thread has no priority of its own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        work()

    thread = threading.Thread(target=run, name=name)
    thread.start()
    return thread
