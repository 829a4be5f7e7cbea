"""Control groups of Linux: which groups limit this process, versions 1 and 2."""

from pathlib import Path, PurePosixPath

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
