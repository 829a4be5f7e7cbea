"""Run a compiled function that works on a range of rows on all cores."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from midfill.kernels.cpu.simd import LANES
from midfill.system.machine import available_threads


def run_over_rows(function: Any, rows: int, *arguments: object) -> None:
    """Call function(first, end, rows, *arguments) for ranges that cover 0 <= row < rows.

    Args:
        function: compiled to release the GIL.
        rows: a multiple of 16, as the lengths of all ranges are.
        arguments: passed on unchanged.
    """
    threads = available_threads()
    share = -(-rows // (threads * LANES)) * LANES
    tasks = [
        _pool().submit(function, first, min(first + share, rows), rows, *arguments)
        for first in range(0, rows, share)
    ]
    for task in tasks:
        task.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(available_threads(), thread_name_prefix="rows")
