"""How fast this machine reads its memory, which bounds how fast a model can decode.

Each token of one stream reads all weights once. ``lab.bench.roofline`` measures more, with compiled
kernels and for longer; this takes a tenth of a second and is kept in the cache folder.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from midfill.system.cache import cache_folder, store_file
from midfill.system.machine import describe_machine

_BUFFER_BYTES = 128 * 2**20  # more than most caches hold
_SECONDS = 0.1
_NAME = "bandwidth.json"


class _Stored(msgspec.Struct):
    """A measurement, and the machine that it is of."""

    processor: str
    cores: int
    bytes_per_second: float


def measure_bandwidth(threads: int) -> float:
    """Return the bytes per second that ``threads`` threads read, the best of a few tries."""
    began = time.perf_counter()
    buffer = np.ones(_BUFFER_BYTES // 8, np.float64)
    parts = np.array_split(buffer, threads)
    fastest = 0.0
    with ThreadPoolExecutor(threads) as pool:
        while fastest == 0.0 or time.perf_counter() - began < _SECONDS:
            started = time.perf_counter()
            list(pool.map(np.max, parts))  # numpy lets other threads run meanwhile
            fastest = max(fastest, buffer.nbytes / (time.perf_counter() - started))
    return fastest


def memory_bandwidth(*, anew: bool = False) -> float:
    """Return this machine's, measured once and kept; the fastest of what was measured.

    Args:
        anew: measure it in any case: what else runs can only make it look slower.
    """
    machine = describe_machine()
    path = cache_folder() / _NAME
    known = 0.0
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
        if (stored.processor, stored.cores) == (machine.processor, machine.cores):
            known = stored.bytes_per_second
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        pass  # it is measured again
    if known > 0.0 and not anew:
        return known
    found = max(known, measure_bandwidth(machine.cores))
    content = msgspec.json.encode(_Stored(machine.processor, machine.cores, found))
    store_file(path, lambda temporary: temporary.write_bytes(content))
    return found
