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
from contextlib import ExitStack, suppress
from typing import Any

from midfill.system.python_child import python_command, python_environment

_log = logging.getLogger(__name__)


Signature = tuple[Any, ...]
"""Numba's types of a function's arguments."""


Call = tuple[Callable[..., Any], Signature]
"""An entry point's Python function, of that name in its module, and the types to compile it for."""


def compile_in_children(groups: Sequence[Sequence[Call]]) -> None:
    """Have entry points compiled and stored in the cache; return when all of that has ended.

    A child that fails is logged: the caller finds nothing in the cache and compiles by itself.

    Args:
        groups: what each child compiles; all children run at the same time.
    """
    with ExitStack() as stack:
        children = []
        for calls in groups:
            try:
                children.append(stack.enter_context(_started(calls)))
            except OSError as error:
                _warn(-1, str(error))
        for child in children:
            assert child.stderr is not None
            complaint = child.stderr.read().decode(errors="replace").strip()
            if status := child.wait():
                _warn(status, complaint)


def _started(calls: Sequence[Call]) -> subprocess.Popen[bytes]:
    """Start a child that compiles entry points.

    Raises:
        OSError: it can't be started.
    """
    child = subprocess.Popen(
        python_command("-m", "midfill.kernels.cpu.compile_child"),
        env=python_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert child.stdin is not None
    with suppress(BrokenPipeError):  # it has died: its status and complaint say why
        pickle.dump(
            [(each.__module__, each.__qualname__, types) for each, types in calls], child.stdin
        )
        child.stdin.flush()
    return child


def _warn(status: int, complaint: str) -> None:
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
