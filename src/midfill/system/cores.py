"""available_threads: how many threads this process can keep busy."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from midfill.system.cgroup import CGROUP_MEMBERSHIP, CGROUP_ROOT, limiting_groups, read_text


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
