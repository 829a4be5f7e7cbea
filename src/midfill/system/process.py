"""This process: its threads' priority, its garbage, its open files, and how it ends."""

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process as Ctrl-C does, with the processes it has started."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def ends_held_back() -> Iterator[None]:
    """Hold SIGTERM and Ctrl-C back until the block's end.

    For something that is started and then noted as what has to be ended: a signal between the two
    would leave it behind. Only the main thread can do it.
    """
    held: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda number, _: held.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


_ENDS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def ends_blocked() -> Iterator[None]:
    """Start processes for which SIGTERM and Ctrl-C wait until they call ``ignore_ends``.

    Supervisors and terminals signal all of a server's processes at once, one that has begun to
    load its libraries, too. A blocked signal stays blocked in a new process, while a handler can be
    set only after some time. This process gets what arrives at the block's end.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows has neither
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_ends() -> None:
    """Ignore SIGTERM and Ctrl-C, those as well that have waited; another process ends this one."""
    for number in _ENDS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)


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


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage in the block, and never what is there at its end.

    For imports and models' vocabularies: what they make is many and stays. Collections would look
    at all of it again and again, a fifth of the time that imports take.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_objects() -> None:
    """Have collections look no more at what is there now; call it once all is loaded.

    A collection stops everything for as long as it takes to look at all objects, tens of
    milliseconds for a few hundred thousand. And the old generation is collected only once it has
    grown by a quarter, so with those objects in it, garbage would stay for long.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # counts the old generation, from which it must grow


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_LARGE_BYTES, _KEPT_BYTES = 1 << 20, 1 << 23  # asyncio takes 256 KiB for whatever it receives


def return_large_blocks() -> None:
    """Have memory of large blocks go back to the system once it is freed.

    glibc does so for blocks beyond a threshold, which it raises up to 32 MB with each that is
    freed. What is beneath comes from the heap, and stays there where anything small lies above it:
    a server kept 75 MB for good after some large requests. With a threshold of one's own it stays
    as it is. Other C libraries are left alone.
    """
    with suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


_SELECTED_SOCKETS = 512  # of Python for Windows


def raise_open_file_limit(wanted: int) -> int:
    """Raise the limit to ``wanted``, as far as the system lets; return the limit.

    A limit that is higher already stays. Windows has none, but its event loop waits for as many
    sockets at most as ``select`` takes.
    """
    try:
        import resource
    except ImportError:
        return min(wanted, _SELECTED_SOCKETS)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= wanted:
        return wanted if soft == unlimited else soft
    allowed = wanted if hard == unlimited else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (ValueError, OSError):  # macOS has a bound of its own
        return soft
    return allowed
