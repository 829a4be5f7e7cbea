"""How much memory this process may still take, on this host and in its control group."""

import os
from pathlib import Path

_FALLBACK = 4 * 2**30  # where the system doesn't tell
_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes of main memory that can be taken without swapping or hitting a limit."""
    free = _meminfo_available() or _physical_memory() // 2 or _FALLBACK
    limit = _cgroup_available()
    return free if limit is None else min(free, limit)


def _meminfo_available() -> int:
    """Linux's own estimate, 0 elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def _cgroup_available() -> int | None:
    """What a container's limit leaves; None without one.

    Cached file pages count as used there but give way, so they are not counted.
    """
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        fields = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(int(limit) - used + int(fields.get("inactive_file", 0)), 0)
