"""Work in the background has less priority; what was there before is not collected."""

import os
import platform
import signal
import subprocess
import sys
import threading

import pytest

from midfill.system.process import (
    ended_by_sigterm,
    ends_blocked,
    ends_held_back,
    start_in_background,
)


def test_the_work_is_done_on_a_thread_of_that_name() -> None:
    done: list[str] = []
    start_in_background(lambda: done.append(threading.current_thread().name), "store").join()
    assert done == ["store"]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux only")
def test_it_has_a_lower_priority_than_its_caller() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    found: list[int] = []
    work = start_in_background(lambda: found.append(os.getpriority(os.PRIO_PROCESS, 0)), "store")
    work.join()
    assert found == [max(own, 10)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


BLOCKS = """
import ctypes, pathlib, sys
from midfill.system.process import return_large_blocks

c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
c.free.argtypes = [ctypes.c_void_p]

def block(size):
    found = c.malloc(size)
    ctypes.memset(found, 1, size)
    return found

def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] == "returned":
    return_large_blocks()
before = resident()
c.free(block(30 << 20))
large = block(20 << 20)
small = [block(100_000) for _ in range(20)]
c.free(large)
print(resident() - before)
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or os.sysconf("SC_PAGE_SIZE") != 4096, reason="glibc's malloc"
)
def test_freed_blocks_that_are_large_go_back_to_the_system() -> None:
    def grown(how: str) -> int:
        command = [sys.executable, "-c", BLOCKS, how]
        return int(subprocess.run(command, capture_output=True, check=True).stdout)

    assert grown("kept") > 20 << 20 > 2 * grown("returned")


PROGRAM = """
import gc, math, weakref
from midfill.system.process import freeze_objects

class Node:
    pass

def cycles(count):
    last = None
    for _ in range(count):
        last = Node()
        last.itself = last
    return weakref.ref(last)

stays = [Node() for _ in range(400_000)]
freeze_objects()
assert len(gc.get_objects()) < 1000, len(gc.get_objects())
old = gc.get_stats()[2]["collections"]
gone = cycles(3 * math.prod(gc.get_threshold()))
assert gc.get_stats()[2]["collections"] > old, "the old generation was never collected"
"""


def test_objects_of_the_start_are_not_looked_at_again() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)


LOADED = """
import gc
from midfill.system.process import without_collections

def collections():
    return sum(generation["collections"] for generation in gc.get_stats())

before = collections()
with without_collections():
    stays = [[] for _ in range(400_000)]
    assert collections() == before
assert gc.isenabled()
assert len(gc.get_objects()) < 1000, len(gc.get_objects())
"""


def test_objects_that_are_loaded_without_collections_are_never_looked_at() -> None:
    subprocess.run([sys.executable, "-c", LOADED], check=True, timeout=60)


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_what_would_end_the_process_waits_for_the_end_of_the_block(
    number: int, raised: type[BaseException]
) -> None:
    reached: list[int] = []

    def hold_back() -> None:
        with ended_by_sigterm(), ends_held_back():
            signal.raise_signal(number)
            reached.append(number)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(raised):
            hold_back()
    finally:
        signal.signal(signal.SIGINT, before)
    assert reached == [number]


IGNORES = """
import signal
from midfill.system.process import ignore_ends

input()  # until it has been signalled
assert {signal.SIGINT, signal.SIGTERM} <= signal.sigpending()
ignore_ends()
signal.raise_signal(signal.SIGTERM)
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""


def test_a_process_that_is_started_with_ends_blocked_never_ends_by_them() -> None:
    with ends_blocked():
        process = subprocess.Popen([sys.executable, "-c", IGNORES], stdin=subprocess.PIPE)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    for number in (signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 0
