"""available_threads: how many threads this process can keep busy."""

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def available_threads(*, cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Cores this process may use, or less where Linux gives it less of their time.

    A container started with 2 CPUs sees all cores of its host, but once its threads together have
    run for as long as 2 cores could, they all stand still until the next period. A thread too
    many makes every step as slow as that.

    Args:
        cgroups: where the control groups are mounted, versions 1 and 2.
        membership: says which of them this process is in.

    Returns:
        Between 1 and the cores of the affinity mask; a quota is rounded up.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    quotas = [quota for folder in _folders(cgroups, membership) for quota in _quotas(folder)]
    return max(1, min([cores, *map(math.ceil, quotas)]))


def _folders(cgroups: Path, membership: Path) -> Iterator[Path]:
    """Groups that may limit the process: its own and all above; ones that don't exist, too."""
    for line in _text(membership).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        # A container may name its group as the host does, or from outside its own root ("/..").
        # The group then lies at the root of what the container sees.
        inner = PurePosixPath(group.strip("/"))
        if ".." in inner.parts:
            inner = PurePosixPath()
        if number == "0":
            mounts = [cgroups]
        elif "cpu" in controllers.split(","):
            mounts = [cgroups / controllers, cgroups / "cpu"]
        else:
            continue
        for mount in mounts:
            yield from (mount / each for each in {inner, *inner.parents})


def _quotas(folder: Path) -> Iterator[float]:
    """The quota of a group, in cores, if it has one: of version 2, then of version 1."""
    texts = (
        _text(folder / "cpu.max"),
        f"{_text(folder / 'cpu.cfs_quota_us')} {_text(folder / 'cpu.cfs_period_us')}",
    )
    for text in texts:
        try:
            quota, period = map(int, text.split())
        except ValueError:
            continue  # "max", or nothing to read
        if quota > 0 and period > 0:  # version 1 writes -1 for no limit
            yield quota / period


def _text(path: Path) -> str:
    """A file's text; nothing where it can't be read."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
