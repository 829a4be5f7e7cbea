"""Description of the machine that a measurement was taken on."""

import os
import platform
from pathlib import Path

import msgspec

from midfill.system.cores import available_threads


class Machine(msgspec.Struct, frozen=True):
    """The properties of a machine that determine speed.

    Attributes:
        processor: the processor's name as the system reports it.
        cores: cores this process may use, or fewer under a CPU quota.
        vector_features: the relevant vector extensions.
        memory_gib: main memory in GiB.
        system: operating system, architecture and Python version.
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
    """Return the description of this machine."""
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
