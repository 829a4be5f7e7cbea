"""How fast all threads read what they go over again and again, by its size.

A ruler for kernels that read: no decode may beat it. So it does nothing but read, in the ways that
the chips' own prefetchers like or don't: one or several streams per thread, prefetched by software
or not, in huge pages where the system gives them. The fastest way is chosen for each size. What is
large is read in slices of about a millisecond, over and over, and of each slice the fastest run
counts: on a machine that others use, too, hardly any long run is undisturbed.
"""

import contextlib
import math
import mmap
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import midfill.kernels.cpu  # noqa: F401 - before Numba

# isort: split
from llvmlite import ir
from numba import types
from numba.core import cgutils

from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated
from midfill.kernels.cpu.jit import kernel, kernel_by_number
from midfill.kernels.cpu.memory import Int32Array
from midfill.kernels.cpu.simd import (
    I32,
    I32_VECTOR,
    I64,
    LANES,
    address,
    integer,
    integers,
    llvm_call,
    load_unaligned,
    store_unaligned,
)
from midfill.kernels.cpu.thread_pool import ThreadPool

LARGEST_BYTES = 512 * 2**20
"""Far more than any cache holds."""
_SMALLEST_BYTES = 512 * 2**10
_STREAMS = (1, 2, 4, 8)
_LINES = 8
"""Cache lines that a loop's turn reads, of all streams together."""
_SHARE_WORDS = 8 * _LINES * LANES
"""A thread's share of the words is a multiple of this."""
_DISTANCE = 2048
"""Bytes that software prefetches ahead in each stream: past what a loop's turn reads."""
_RUN_BYTES = 32 * 2**20
"""Read per run; what is smaller is gone over several times, what is larger in slices."""
_TRIALS = 3
_RUNS = 8
_PASSES = 16
"""Of a plain read: as many as a round of decoding has steps."""
_SMAPS = Path("/proc/self/smaps")
_HUGE = "AnonHugePages:"


def _reader(streams: int, prefetches: bool) -> Any:
    """Generate the kernel that reads several streams in turn."""

    @generated(types.void, OWN, INDEX, INDEX, OWN, INDEX)
    def operation(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
        """Combine all words of a part of a buffer, cut into as many streams.

        Args:
            buffer: int32.
            first: the part's first word.
            words: of the part, a multiple of ``_SHARE_WORDS``.
            sink: int32, receives 16 words from ``at`` on: reads whose result nobody sees would be
                optimized away.
        """
        buffer, first, words, sink, at = arguments
        start = address(context, builder, kinds[0], buffer, first)
        length = builder.sdiv(words, integer(streams))
        pointers = [builder.gep(start, [builder.mul(length, integer(s))]) for s in range(streams)]
        lines = _LINES // streams
        cells = [cgutils.alloca_once_value(builder, integers(0)) for _ in range(4)]
        turns = builder.sdiv(length, integer(lines * LANES))
        with cgutils.for_range(builder, turns, intp=I64) as turn:
            begin = builder.mul(turn.index, integer(lines * LANES))
            for number in range(_LINES):
                line, stream = divmod(number, streams)
                place = builder.add(begin, integer(line * LANES))
                pointer = builder.gep(pointers[stream], [place])
                if prefetches:
                    _prefetch(builder, pointer)
                cell = cells[number % len(cells)]
                value = load_unaligned(builder, pointer, I32_VECTOR)
                builder.store(builder.or_(builder.load(cell), value), cell)
        total = builder.load(cells[0])
        for cell in cells[1:]:
            total = builder.or_(total, builder.load(cell))
        store_unaligned(builder, total, address(context, builder, kinds[3], sink, at))

    return operation


def _prefetch(builder: ir.IRBuilder, pointer: Any) -> None:
    """Prefetch what lies ahead of a pointer to a word into the first-level cache."""
    ahead = builder.gep(pointer, [integer(_DISTANCE // 4)])
    hints = [I32(0), I32(3), I32(1)]  # read, into all levels, data
    llvm_call(builder, "llvm.prefetch.p0", [ahead, *hints], ir.VoidType())


_WAYS = [(streams, prefetches) for streams in _STREAMS for prefetches in (False, True)]
_read_part = kernel_by_number({number: _reader(*way) for number, way in enumerate(_WAYS)})


@kernel
def _read(
    thread: int, threads: int, sync: Any, buffer: Any, first: int, words: int, passes: int,
    way: int, sink: Any,
) -> None:  # fmt: skip
    """Read this thread's share of some words of a buffer, several times."""
    share = words // threads // _SHARE_WORDS * _SHARE_WORDS
    for _ in range(passes):
        _read_part(way, buffer, first + thread * share, share, sink, thread * LANES)


class ReadProbe:
    """A buffer, threads that read it, and the fastest way for each size.

    Attributes:
        threads: that read together.
        huge_page_share: of the buffer, what the system backs with huge pages; 0 where it doesn't
            say.
    """

    def __init__(self, threads: int, largest: int = LARGEST_BYTES) -> None:
        """Allocate the buffer, compile the ways of reading and try them, for about two seconds.

        Args:
            threads: that read together.
            largest: bytes of the buffer.
        """
        self.threads = threads
        self._buffer, self.huge_page_share = _allocate(largest)
        self._sink = np.zeros(threads * LANES, np.int32)
        self._pool = ThreadPool(threads)
        # Compiled, and its pages touched, by a run that doesn't count.
        _read(0, threads, self._pool.sync, self._buffer, 0, len(self._buffer), 1, 0, self._sink)
        self._way = {size: self._fastest_way(size) for size in _sizes(largest)}

    def rates(self, sizes: Iterable[int] = ()) -> dict[int, float]:
        """Return how fast some numbers of bytes are read: size -> bytes/s, the best of a few runs.

        Args:
            sizes: bytes, beside some from 512 KiB to the buffer's size; those that exceed the
                buffer are left out.
        """
        largest = self._buffer.nbytes
        wanted = {self._whole(size) for size in sizes if size <= largest} | set(self._way)
        return {size: self._best(size, self._way_of(size), _RUNS) for size in sorted(wanted)}

    def pass_seconds(self, size: int) -> float:
        """Return how long a pass over some bytes takes, the median of a few: a plain read of them.

        A rate is that of the fastest moments; this is what whoever reads the bytes now can expect.

        Args:
            size: bytes; of more than the buffer holds, the buffer's pass is scaled.
        """
        read = self._whole(min(size, max(self._way)))
        way, seconds = self._way_of(read), []
        for _ in range(_PASSES):
            began = time.perf_counter()
            self._pool.run(_read, self._buffer, 0, read // 4, 1, way, self._sink)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds) * size / read

    def way(self, size: int) -> tuple[int, bool]:
        """Return how that many bytes are read: streams per thread, whether they are prefetched."""
        return _WAYS[self._way_of(size)]

    def close(self) -> None:
        """End the threads."""
        self._pool.close()

    def _whole(self, size: int) -> int:
        """Return a size that all threads can divide, no larger than asked for if there is one."""
        unit = 4 * _SHARE_WORDS * self.threads
        return max(size // unit, 1) * unit

    def _way_of(self, size: int) -> int:
        return self._way[max([known for known in self._way if known <= size] or [min(self._way)])]

    def _fastest_way(self, size: int) -> int:
        rates = [self._best(size, way, _TRIALS) for way in range(len(_WAYS))]
        return rates.index(max(rates))

    def _best(self, size: int, way: int, runs: int) -> float:
        """Return the bytes per second of the fastest run of each slice."""
        size = self._whole(size)
        passes = max(_RUN_BYTES // size, 1)
        slice_bytes = min(self._whole(_RUN_BYTES), size)
        starts = range(0, size, slice_bytes)
        seconds = [math.inf] * len(starts)
        for _ in range(runs):
            for number, start in enumerate(starts):
                words = min(slice_bytes, size - start) // 4
                began = time.perf_counter()
                self._pool.run(_read, self._buffer, start // 4, words, passes, way, self._sink)
                seconds[number] = min(seconds[number], time.perf_counter() - began)
        return size * passes / sum(seconds)


def _sizes(largest: int) -> list[int]:
    """Return sizes from 512 KiB to the largest, each four times the one before."""
    sizes = []
    size = min(_SMALLEST_BYTES, largest)
    while size < largest:
        sizes.append(size)
        size *= 4
    return [*sizes, largest]


def _allocate(size: int) -> tuple[Int32Array, float]:
    """Return a buffer of ones, and the share of it that lies in huge pages."""
    # What is prefetched at the end lies behind a thread's share, and behind the buffer for the
    # last one: prefetches of memory that isn't there do nothing.
    if sys.platform == "win32":
        memory = mmap.mmap(-1, size)
    else:  # shared memory, the default, gets no huge pages
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    buffer: Int32Array = np.frombuffer(memory, np.int32)
    buffer.fill(1)
    return buffer, min(_huge_bytes(buffer.ctypes.data) / size, 1.0)


def _huge_bytes(start: int) -> int:
    """Return the bytes in huge pages of the mapping that an address lies in; 0 if unknown."""
    try:
        lines = _SMAPS.read_text().splitlines()
    except OSError:
        return 0
    inside = False
    for line in lines:
        first, _, rest = line.partition(" ")
        begin, dash, end = first.partition("-")
        if dash and rest:
            inside = int(begin, 16) <= start < int(end, 16)
        elif inside and first == _HUGE:
            return int(rest.split()[0]) * 1024
    return 0
