"""Compilation in a process of its own, whose result the caller loads from the cache.

What LLVM takes to compile a forward pass, hundreds of megabytes, a process never gives back.

Started as ``python -m midfill.kernels.cpu.compile_child``. Standard input is a pipe that the caller
holds: what to compile comes through it, and when it closes, because the caller ends or died, this
process ends at once.
"""

import gc
import importlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from midfill.system.python_child import python_command, python_environment

_log = logging.getLogger(__name__)


Signature = tuple[Any, ...]
"""Numba's types of a function's arguments."""


def compile_in_child(calls: Sequence[tuple[Callable[..., Any], Signature]]) -> None:
    """Have a child compile entry points and store them in the cache; return when it has ended.

    A child that fails is logged: the caller finds nothing in the cache and compiles by itself.

    Args:
        calls: the entry points' Python functions, of that name in their modules.
    """
    task = pickle.dumps([(each.__module__, each.__qualname__, types) for each, types in calls])
    try:
        with subprocess.Popen(
            python_command("-m", "midfill.kernels.cpu.compile_child"),
            env=python_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as child:
            assert child.stdin is not None
            assert child.stderr is not None
            child.stdin.write(task)
            child.stdin.flush()
            complaint = child.stderr.read().decode(errors="replace").strip()
            status = child.wait()
    except OSError as error:
        status, complaint = -1, str(error)
    if status:
        _log.warning(
            "the process that compiles kernels ended with status %d (%s); they are compiled here",
            status,
            complaint.rpartition("\n")[-1] or "it gave no reason",
        )


def main() -> None:
    """Compile what standard input names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C
    gc.disable()  # what the compiler makes is gone soon enough, with this process
    calls: list[tuple[str, str, Signature]] = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_caller, daemon=True).start()
    for module, name, types in calls:
        getattr(importlib.import_module(module), name).compile_here(types)
    os._exit(0)


def _end_with_caller() -> None:
    """Wait for the end of standard input."""
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
