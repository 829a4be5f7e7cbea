"""What machine a measurement was taken on."""

import os
import platform
from pathlib import Path

import msgspec

from midfill.system.cores import available_threads


class Machine(msgspec.Struct, frozen=True):
    """The parts of a machine that decide speed.

    Attributes:
        processor: its name as the system tells it.
        cores: cores this process may use, or as many as its quota of CPU time amounts to.
        vector_features: the vector extensions that matter here.
        memory_gib: main memory.
        system: kernel and Python.
    """

    processor: str
    cores: int
    vector_features: list[str]
    memory_gib: float
    system: str

    def __str__(self) -> str:
        features = ", ".join(self.vector_features) or "no AVX"
        return (
            f"{self.processor}, {self.cores} cores ({features}), "
            f"{self.memory_gib:.0f} GiB, {self.system}"
        )


_FEATURES = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"),
    *("asimd", "i8mm"),
)


def describe_machine() -> Machine:
    """Look at the machine this runs on."""
    fields: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (AttributeError, ValueError, OSError):
        memory = float("nan")
    return Machine(
        processor=fields.get("model name") or platform.processor() or platform.machine(),
        cores=available_threads(),
        vector_features=[feature for feature in _FEATURES if feature in flags],
        memory_gib=memory,
        system=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    )
