"""A machine's ceilings: bytes read and operations done per second, and which of them binds."""

from collections.abc import Iterable
from enum import StrEnum
from functools import reduce
from pathlib import Path

import msgspec

from midfill_lab.bench.roofline.arithmetic import ArithmeticProbe
from midfill_lab.bench.roofline.reads import LARGEST_BYTES, ReadProbe

_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 2**10, "M": 2**20}


class Resource(StrEnum):
    """What a part of a step can wait for."""

    MEMORY = "memory"
    CACHE = "cache"
    INT8 = "int8"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """A machine's ceilings, on all threads together.

    Attributes:
        reads: bytes/s by the bytes that are gone over again and again, at least one entry.
        int8_per_second: operations on int8, two for each product that is added, by the
            instructions of ``kernels.cpu.dots``; a chip's AMX does more.
        bfloat16_per_second: operations on bfloat16, counted likewise; float32's on chips that don't
            multiply bfloat16.
        float32_per_second: operations on float32, counted likewise.
        cache_bytes: of the last-level cache, which other guests of the machine may share; 0 where
            the system doesn't say.
        streams, prefetched: how memory was read fastest: streams per thread, and whether by
            prefetches of software.
        huge_page_share: of the buffer that was read.
    """

    reads: dict[int, float]
    int8_per_second: float
    bfloat16_per_second: float
    float32_per_second: float
    cache_bytes: int = 0
    streams: int = 1
    prefetched: bool = False
    huge_page_share: float = 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes read from memory per second."""
        return self.reads[max(self.reads)]

    def read_rate(self, size: int) -> float:
        """Return the bytes/s at which ``size`` bytes can be read again and again at most.

        That is the rate of the largest measured size that is no larger. A rate never exceeds that
        of fewer bytes: where it was measured so, the smaller number was measured at a bad moment.
        """
        known = [each for each in self.reads if each <= size] or [min(self.reads)]
        return max(rate for each, rate in self.reads.items() if each >= max(known))

    def read_from(self, size: int) -> Resource:
        """Return where ``size`` bytes lie that are read again and again."""
        return Resource.CACHE if size <= self.cache_bytes else Resource.MEMORY

    def operation_rate(self, resource: Resource) -> float:
        """Return the operations per second of a kind of arithmetic."""
        return {
            Resource.INT8: self.int8_per_second,
            Resource.BFLOAT16: self.bfloat16_per_second,
            Resource.FLOAT32: self.float32_per_second,
        }[resource]

    def best(self, other: "Roofline") -> "Roofline":
        """Return the higher of each ceiling of two measurements of one machine."""
        sizes = self.reads.keys() | other.reads.keys()
        return msgspec.structs.replace(
            self,
            reads={s: max(self.reads.get(s, 0.0), other.reads.get(s, 0.0)) for s in sorted(sizes)},
            int8_per_second=max(self.int8_per_second, other.int8_per_second),
            bfloat16_per_second=max(self.bfloat16_per_second, other.bfloat16_per_second),
            float32_per_second=max(self.float32_per_second, other.float32_per_second),
        )


class RooflineProbe:
    """Measures a machine's ceilings again and again; each time takes about half a second.

    On a machine that others share the ceilings move within minutes. So whoever compares a
    measurement with them measures them just before it and just after it.
    """

    def __init__(self, threads: int, largest: int | None = None) -> None:
        """Compile the probes and find the fastest ways of reading.

        Args:
            threads: that read and compute together.
            largest: bytes of the buffer that is read; None is 512 MiB.
        """
        self._reads = ReadProbe(threads, largest or LARGEST_BYTES)
        self._arithmetic = ArithmeticProbe(threads)

    def measure(self, sizes: Iterable[int] = ()) -> Roofline:
        """Return the ceilings of this moment.

        Args:
            sizes: bytes whose rate is measured, too.
        """
        reads = self._reads.rates(sizes)
        streams, prefetched = self._reads.way(max(reads))
        float32 = self._arithmetic.float32()
        return Roofline(
            reads=reads,
            int8_per_second=self._arithmetic.int8(),
            bfloat16_per_second=self._arithmetic.bfloat16() or float32,
            float32_per_second=float32,
            cache_bytes=cache_bytes(),
            streams=streams,
            prefetched=prefetched,
            huge_page_share=self._reads.huge_page_share,
        )

    def pass_seconds(self, size: int) -> float:
        """Return how long a plain read of so many bytes takes now, see ``ReadProbe``."""
        return self._reads.pass_seconds(size)

    def close(self) -> None:
        """End the threads."""
        self._reads.close()
        self._arithmetic.close()


def measure_roofline(threads: int, times: int = 3) -> Roofline:
    """Return the best of a few measurements of the ceilings: about four seconds."""
    probe = RooflineProbe(threads)
    try:
        return reduce(Roofline.best, [probe.measure() for _ in range(times)])
    finally:
        probe.close()


def cache_bytes(folder: Path = _CPU_CACHES) -> int:
    """Return the size of the largest cache that a core sees; 0 where the system doesn't say.

    Args:
        folder: Linux's description of a core's caches.
    """
    sizes = [0]
    for file in folder.glob("index*/size"):
        try:
            text = file.read_text().strip()
            sizes.append(int(text[:-1]) * _UNITS[text[-1:]])
        except (OSError, ValueError, KeyError):
            continue
    return max(sizes)
