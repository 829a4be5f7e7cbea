"""Isolation of this process from the rest of the machine, step by step; nothing can be undone."""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

PLACE = "/program"
"""In namespaces: where each program's private folder is mounted."""

_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_PIDS, _NEW_NETWORK = (
    1 << 17,
    1 << 27,
    1 << 28,
    1 << 29,
    1 << 30,
)
_NOBODY = 65534
_MAX_OPEN_FILES = 64
_MAX_PROCESSES = 64

# Linux: sys/mount.h, linux/mount.h, sys/prctl.h, linux/capability.h
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_RECURSIVE, _MS_PRIVATE = 2, 4, 1 << 12, 1 << 14, 1 << 18
_MOUNT_SETATTR = 442  # the same number on every architecture
_AT_CURRENT, _AT_RECURSIVE = -100, 0x8000
_READ_ONLY, _NO_SETUID = 1, 2
_PARENT_DEATH_SIGNAL, _DUMPABLE, _NO_NEW_PRIVILEGES = 1, 4, 38
_CAPABILITY_VERSION = 0x20080522

# What a Python program needs to see of the machine, where it exists.
_SYSTEM_PATHS = (
    *("/usr", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/nix/store"),
    *("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"),
)

# Prefixes of audit events that a program without namespaces may not cause.
_FORBIDDEN = (
    *("socket.", "subprocess.", "ctypes.", "pty.", "shutil.", "syslog.", "webbrowser.", "gc."),
    *("os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "os.kill"),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "os.chown", "os.chflags", "os.utime", "os.setxattr", "os.removexattr"),
    *("resource.prlimit", "signal.pthread_kill"),
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def enter_namespaces(folder: str) -> None:
    """Enter namespaces without network and with a read-only root of the bare necessities.

    Args:
        folder: an empty folder, which becomes the root.

    Raises:
        OSError: the system doesn't permit it.
        AttributeError: libc has no such calls.
    """
    user, group = os.getuid(), os.getgid()
    visible = _visible_paths()
    _raise_oom_score()
    _call("unshare", _NEW_USER | _NEW_MOUNTS | _NEW_NETWORK | _NEW_IPC)
    for name, value in (
        ("setgroups", "deny"),
        ("uid_map", f"{_NOBODY} {user} 1"),
        ("gid_map", f"{_NOBODY} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(value)
    _call("mount", None, b"/", None, _MS_RECURSIVE | _MS_PRIVATE, None)
    mount_memory(folder)
    os.mkdir(folder + PLACE)
    for path in visible:
        _bind(path, folder + path)
    # Without capabilities there is no way out of a changed root, nor into new user namespaces.
    os.chroot(folder)
    os.chdir("/")
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY | _NO_SETUID, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    _call("syscall", _MOUNT_SETATTR, _AT_CURRENT, b"/", _AT_RECURSIVE, attributes, size)


def enter_process_namespace() -> None:
    """Make the next child the first process of a PID namespace, with mounts of its own.

    When that child ends, the kernel kills all other processes of the namespace.
    """
    _call("unshare", _NEW_PIDS | _NEW_MOUNTS)


def mount_memory(folder: str) -> None:
    """Mount an empty file system in memory on a folder."""
    flags = _MS_NOSUID | _MS_NODEV
    _call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", flags, b"size=64m,mode=700")


def hide_memory() -> None:
    """Keep other processes of the user from reading or tracing this one and its forks."""
    if sys.platform == "linux":
        _call("prctl", _DUMPABLE, 0, 0, 0, 0)


def detach(keep: Sequence[int], place: str) -> list[int]:
    """Leave the session, and give up all descriptors but a few, and the environment.

    Args:
        keep: descriptors to keep.
        place: folder to work in.

    Returns:
        The kept descriptors' new numbers: 3 and up.
    """
    os.setsid()
    for number in (signal.SIGALRM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    first_free = 3 + len(keep)
    copies = [_duplicate_above(descriptor, first_free) for descriptor in keep]
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    kept = [os.dup2(copy, 3 + index) for index, copy in enumerate(copies)]
    os.closerange(first_free, max(256, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    os.chdir(place)
    os.environ.clear()
    sys.argv[:] = ["program.py"]
    return kept


def limit_resources(
    cpu_seconds: int, memory_bytes: int, file_bytes: int, *, children: bool
) -> None:
    """Limit this process and its children.

    Args:
        cpu_seconds: CPU time of each process.
        memory_bytes: address space of each process.
        file_bytes: size of each file.
        children: whether it may start processes.
    """
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
        resource.RLIMIT_NPROC: _MAX_PROCESSES if children else 0,
    }
    for which, limit in limits.items():
        hard = resource.getrlimit(which)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        try:
            resource.setrlimit(which, (value, value))
        except (OSError, ValueError):
            if sys.platform == "linux":  # macOS has no limit on address space
                raise


def give_up_privileges(*, in_namespaces: bool) -> None:
    """Drop all capabilities, for good, and end when the parent ends."""
    if sys.platform != "linux":
        return
    if in_namespaces:
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
        _call("capset", header, (ctypes.c_uint32 * 6)())
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call("prctl", _PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def refuse_by_audit_hook(place: str) -> None:
    """Let Python refuse what a program doesn't need.

    Args:
        place: the only folder where files may be written.
    """
    import _posixsubprocess
    import posix

    # These have no audit events.
    vars(_posixsubprocess)["fork_exec"] = _refused
    for module in (os, posix, signal, sys.modules.get("_signal")):
        for name in ("pidfd_open", "pidfd_send_signal"):
            if hasattr(module, name):
                setattr(module, name, _refused)
    sys.addaudithook(_hook(place))


def _hook(place: str) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook; the program can replace globals, so it uses none."""
    forbidden, writing, devnull = _FORBIDDEN, _WRITING, os.devnull
    inside = os.path.realpath(place) + os.sep
    resolve, decode, is_any, refused = os.path.realpath, os.fsdecode, isinstance, PermissionError
    names, texts = ("open", "os.listdir", "os.scandir"), (str, bytes, os.PathLike)

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(forbidden):
            raise refused(f"{event} is not allowed in the sandbox")
        if event == "import" and arguments[0] == "_posixsubprocess":
            raise refused("processes are not allowed in the sandbox")
        if event == "object.__setattr__" and arguments[0] is refuse:
            raise refused("the sandbox can't be changed")
        if event in names and is_any(arguments[0], texts):
            path = resolve(decode(arguments[0]))
            if f"{path}/".startswith("/proc/"):
                raise refused("/proc is not readable for sandboxed programs")
            writes = event == "open" and (arguments[2] or 0) & writing
            if writes and not path.startswith(inside) and path != devnull:
                raise refused(f"{path} is not writable for sandboxed programs")

    return refuse


def _refused(*_: object, **__: object) -> NoReturn:
    raise PermissionError("not allowed in the sandbox")


def _visible_paths() -> list[str]:
    """Return the absolute paths to show in the new root; none lies inside another."""
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    with open("/proc/self/maps") as maps:
        mapped = {line.rstrip("\n").partition("/")[2] for line in maps if ".so" in line}
    wanted = {
        *_SYSTEM_PATHS,
        *(sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.__file__)),
        *(os.path.dirname("/" + path) for path in mapped),
        *libraries,
    }
    visible: list[str] = []
    for path in sorted(os.path.normpath(path) for path in wanted if path.startswith("/")):
        inside = any(path.startswith(f"{parent}/") for parent in visible)
        if path != "/" and not inside and os.path.exists(path):
            visible.append(path)
    return visible


def _bind(source: str, target: str) -> None:
    """Show a file or folder at another path."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    flags = _MS_BIND | _MS_RECURSIVE
    _call("mount", os.fsencode(source), os.fsencode(target), None, flags, None)


def _duplicate_above(descriptor: int, minimum: int) -> int:
    """Return a copy of a descriptor whose number is at least ``minimum``."""
    copies = [os.dup(descriptor)]
    while copies[-1] < minimum:
        copies.append(os.dup(descriptor))
    return copies[-1]


def _raise_oom_score() -> None:
    """Make the kernel kill these processes first if memory runs out."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _call(name: str, *arguments: object) -> None:
    """Call a function of libc.

    Raises:
        OSError: it failed.
        AttributeError: libc has no such function.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
