"""available_memory: how much memory this process may still take."""

import os
from collections.abc import Iterator
from pathlib import Path

from midfill.system.cgroup import CGROUP_MEMBERSHIP, CGROUP_ROOT, limiting_groups, read_text

_FALLBACK = 4 * 2**30  # bytes, where the system reports nothing
_MEMINFO = Path("/proc/meminfo")


def available_memory(
    *,
    root: Path = CGROUP_ROOT,
    membership: Path = CGROUP_MEMBERSHIP,
    meminfo: Path = _MEMINFO,
) -> int:
    """Return the bytes of main memory that can be taken without swapping or hitting a limit.

    Args:
        root: where control groups are mounted.
        membership: file that names the groups of this process.
        meminfo: Linux's summary of the host's memory.

    Returns:
        The host's available memory, or what the tightest control group leaves if that is less.
    """
    free = _host_available(meminfo) or _physical_memory() // 2 or _FALLBACK
    groups = limiting_groups("memory", root=root, membership=membership)
    return min([free, *(left for group in groups for left in _headroom(group))])


def _host_available(meminfo: Path) -> int:
    """Return Linux's own estimate in bytes, 0 elsewhere."""
    for line in read_text(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def _headroom(group: Path) -> Iterator[int]:
    """Yield the bytes a group's limit leaves, if it has one.

    Cached file pages count as used, but the kernel drops them under pressure. They are therefore
    counted as free.
    """
    names = (
        ("memory.max", "memory.current", "inactive_file"),  # version 2
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
    )
    for limit_file, usage_file, cached_key in names:
        try:
            limit, used = int(read_text(group / limit_file)), int(read_text(group / usage_file))
        except ValueError:
            continue  # "max", or nothing to read
        if limit >= 0:  # version 1 writes -1, or a number beyond any memory, for no limit
            yield max(limit - used + _statistic(group / "memory.stat", cached_key), 0)


def _statistic(path: Path, key: str) -> int:
    """Return a value of memory.stat in bytes, 0 where it is missing."""
    for line in read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isdecimal():
            return int(value)
    return 0
