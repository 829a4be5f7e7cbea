"""The machine that this process runs on, and how much of it the process may use.

Limits of Linux's control groups count, versions 1 and 2: a container sees all cores and all memory
of its host, whatever it was given.
"""

import ctypes
import ipaddress
import math
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import msgspec


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


CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")


def limiting_groups(controller: str, *, root: Path, membership: Path) -> list[Path]:
    """Return the folders of all groups that may limit this process, version 2 first.

    A limit applies to a group and to everything below it. So the process's own group counts, and
    so does each of its ancestors.

    Args:
        controller: name of the version 1 controller, such as "cpu" or "memory".
        root: where control groups are mounted.
        membership: file that names the groups of this process.

    Returns:
        Each process's own group before its ancestors. Some of the folders may not exist.
    """
    folders: list[Path] = []
    for line in read_text(membership).splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        # A container may see the name its group has on the host, or a name outside its own root
        # ("/.."). Its group is then mounted as the root, which is among the ancestors anyway.
        own = PurePosixPath(group.strip("/"))
        if ".." in own.parts:
            own = PurePosixPath()
        if hierarchy == "0":
            mounts = [root]
        elif controller in controllers.split(","):
            mounts = [root / controllers, root / controller]
        else:
            continue
        for mount in mounts:
            folders += [mount / path for path in dict.fromkeys((own, *own.parents))]
    return folders


def read_text(path: Path) -> str:
    """Return a file's text, "" where it can't be read."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def available_threads(*, root: Path = CGROUP_ROOT, membership: Path = CGROUP_MEMBERSHIP) -> int:
    """Return the number of cores this process may use, or fewer under a CPU quota.

    A container started with 2 CPUs sees all cores of its host. Once its threads together have used
    2 cores' worth of a period, all of them are throttled until the next period. One thread too
    many therefore slows down every step.

    Args:
        root: where control groups are mounted.
        membership: file that names the groups of this process.

    Returns:
        Between 1 and the number of cores in the affinity mask. A quota is rounded up.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    groups = limiting_groups("cpu", root=root, membership=membership)
    quotas = [quota for group in groups for quota in _quotas(group)]
    return max(1, min([cores, *map(math.ceil, quotas)]))


def _quotas(group: Path) -> Iterator[float]:
    """Yield a group's CPU quota in cores, if it has one."""
    texts = (
        read_text(group / "cpu.max"),  # version 2
        f"{read_text(group / 'cpu.cfs_quota_us')} {read_text(group / 'cpu.cfs_period_us')}",
    )
    for text in texts:
        try:
            quota, period = map(int, text.split())
        except ValueError:
            continue  # "max", or nothing to read
        if quota > 0 and period > 0:  # version 1 writes -1 for no limit
            yield quota / period


def is_local(url: str) -> bool:
    """Whether a URL names this machine, by an address of its own or as localhost."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
        What ``reported_memory`` returns, half of the machine's memory where the system says
        nothing.
    """
    reported = reported_memory(root=root, membership=membership, meminfo=meminfo)
    return _physical_memory() // 2 or _FALLBACK if reported is None else reported


def reported_memory(
    *,
    root: Path = CGROUP_ROOT,
    membership: Path = CGROUP_MEMBERSHIP,
    meminfo: Path = _MEMINFO,
) -> int | None:
    """Return how much memory the system says is available; None if it doesn't say.

    Args:
        root, membership, meminfo: see ``available_memory``.

    Returns:
        The host's available memory, or what the tightest control group leaves if that is less.
    """
    groups = limiting_groups("memory", root=root, membership=membership)
    reported = [left for group in groups for left in _headroom(group)]
    if (host := _host_available(meminfo)) > 0:
        reported.append(host)
    return min(reported, default=None)


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


def has_gpu_driver() -> bool:
    """Whether a driver of NVIDIA or AMD GPUs is installed: without one, no library finds a GPU."""
    if Path("/dev/kfd").exists():
        return True
    for name in ("libcuda.so.1", "nvcuda.dll"):
        with suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False


def format_size(count: int) -> str:
    """Return a number of bytes with three significant digits and a unit."""
    size = float(count)
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1024
    return f"{count} bytes" if unit == "bytes" else f"{size:.3g} {unit}"
