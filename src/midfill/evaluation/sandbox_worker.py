"""The sandbox's worker: a script that runs untrusted programs, one after the other, in forks.

It is started by its path in a bare interpreter, so it imports the standard library only. Programs
inherit the modules loaded here; running one takes two forks and no interpreter start. Its
guarantees are described in ``sandbox.py``.

Protocol: mode and folder are arguments. It writes ``{"isolation": ...}``, then replies to every
line on standard input, ``{"source", "token", "cpu_seconds", "wall_seconds", "memory_bytes",
"file_bytes"}``, with a line ``{"passed", "reason"}`` or ``{"error"}``.
"""

# Programs use these modules; a fork inherits them at no cost.
import bisect  # noqa: F401
import collections  # noqa: F401
import contextlib
import copy  # noqa: F401
import ctypes
import datetime  # noqa: F401
import functools  # noqa: F401
import hashlib  # noqa: F401
import heapq  # noqa: F401
import itertools  # noqa: F401
import json
import math  # noqa: F401
import operator  # noqa: F401
import os
import random
import re  # noqa: F401
import resource
import shutil
import signal
import string  # noqa: F401
import sys
import tempfile
import typing
from types import FrameType

Job = dict[str, typing.Any]

_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_PIDS, _NEW_NETWORK = (
    1 << 17,
    1 << 27,
    1 << 28,
    1 << 29,
    1 << 30,
)
_NOBODY = 65534
_REPORT_FD = 3  # where a program's process reports how it ended
_MAX_OPEN_FILES = 64
_MAX_PROCESSES = 64
_TMPFS_OPTIONS = b"size=64m,mode=700"

# Linux: sys/mount.h, linux/mount.h, sys/prctl.h, linux/capability.h
_MS_NOSUID, _MS_NODEV, _MS_RECURSIVE, _MS_PRIVATE = 2, 4, 1 << 14, 1 << 18
_MOUNT_SETATTR = 442  # the same number on every architecture
_AT_CURRENT, _AT_RECURSIVE = -100, 0x8000
_READ_ONLY, _NO_SETUID = 1, 2
_PARENT_DEATH_SIGNAL, _NO_NEW_PRIVILEGES = 1, 38
_CAPABILITY_VERSION = 0x20080522

# Prefixes of audit events that a program without namespaces may not cause.
_FORBIDDEN = (
    *("socket.", "subprocess.", "ctypes.", "pty.", "shutil.", "syslog.", "webbrowser."),
    *("os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "os.kill"),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "os.chown", "os.chflags", "os.utime", "os.setxattr", "os.removexattr"),
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main(mode: str, folder: str) -> None:
    """Serve jobs from standard input until it ends.

    Args:
        mode: "namespaces", "audit-hook", or "auto", which is namespaces if the system permits.
        folder: an empty folder for the programs' working directories.
    """
    jobs = os.fdopen(os.dup(0), "rb")
    replies = os.dup(1)
    in_namespaces = False
    if mode != "audit-hook":
        try:
            enter_namespaces()
            in_namespaces = True
        except (OSError, AttributeError) as error:  # AttributeError: a libc without unshare
            if mode == "namespaces":
                _reply(replies, {"error": f"no namespaces: {error}"})
                return
    _reply(replies, {"isolation": "namespaces" if in_namespaces else "audit-hook"})
    for line in jobs:
        supervisor = os.fork()
        if supervisor == 0:
            try:
                _reply(replies, supervise(json.loads(line), in_namespaces, folder))
            except BaseException as error:
                _reply(replies, {"error": f"{type(error).__name__}: {error}"})
            os._exit(0)
        _, status = os.waitpid(supervisor, 0)
        if status:
            _reply(replies, {"passed": False, "reason": "killed with its supervisor"})


def enter_namespaces() -> None:
    """Enter namespaces without network and with read-only file systems, irrevocably.

    Raises:
        OSError: the system doesn't permit it.
    """
    user, group = os.getuid(), os.getgid()
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
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY | _NO_SETUID, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    _call("syscall", _MOUNT_SETATTR, _AT_CURRENT, b"/", _AT_RECURSIVE, attributes, size)


def supervise(job: Job, in_namespaces: bool, folder: str) -> dict[str, object]:
    """Run one program as a child of this process, and remove everything it leaves.

    Returns:
        The reply.
    """
    if in_namespaces:
        # The child is the first process of its PID namespace: when it ends, all others are killed.
        _call("unshare", _NEW_PIDS | _NEW_MOUNTS)
        flags = _MS_NOSUID | _MS_NODEV
        _call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", flags, _TMPFS_OPTIONS)
        place = folder
    else:
        place = tempfile.mkdtemp(dir=folder)
    report, report_end = os.pipe()
    program = os.fork()
    if program == 0:
        _run_program(job, in_namespaces, place, report_end)
    os.close(report_end)
    expired = False

    def expire(number: int, frame: FrameType | None) -> None:
        nonlocal expired
        expired = True
        os.kill(program, signal.SIGKILL)

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, job["wall_seconds"])
    _, status = os.waitpid(program, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if not in_namespaces:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(program, signal.SIGKILL)
        shutil.rmtree(place, ignore_errors=True)
    os.set_blocking(report, False)  # a child of the program may still hold the other end
    try:
        message = os.read(report, 4096).decode(errors="replace")
    except BlockingIOError:
        message = ""
    return _verdict(job, status, message, expired)


def _verdict(job: Job, status: int, message: str, expired: bool) -> dict[str, object]:
    code, cpu_seconds = os.waitstatus_to_exitcode(status), _child_cpu_seconds()
    if message == job["token"] and code == 0:
        return {"passed": True, "reason": "passed"}
    if expired:
        reason = "still running at the wall time limit"
    elif code in (-signal.SIGXCPU, -signal.SIGKILL) and cpu_seconds > 0.8 * job["cpu_seconds"]:
        reason = "CPU time limit"
    elif code < 0:
        reason = f"killed by signal {-code}"
    elif message.startswith("raised "):
        reason = message
    else:
        reason = "ended before its tests did"
    return {"passed": False, "reason": reason}


def _child_cpu_seconds() -> float:
    """Return the CPU time of the ended children, at the kernel's resolution."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _run_program(job: Job, in_namespaces: bool, place: str, report_end: int) -> typing.NoReturn:
    """Turn this fork into the program's process and run it; never returns."""
    process = os.getpid()
    message = b"ended in the sandbox"
    try:
        _detach(place, report_end)
        _limit(job, in_namespaces)
        if sys.platform == "linux":
            if in_namespaces:
                _drop_capabilities()
            _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
            _call("prctl", _PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if not in_namespaces:
            sys.addaudithook(_hook(place))
        random.seed(0)
        exec(compile(job["source"], "program.py", "exec"), {"__name__": "program"})
        message = job["token"].encode()
    except BaseException as error:
        message = f"raised {type(error).__name__}".encode()
    finally:
        try:
            if os.getpid() == process:  # a child that the program forked gets here, too
                os.write(_REPORT_FD, message)
        finally:
            os._exit(0)


def _detach(place: str, report_end: int) -> None:
    """Give up everything but an empty folder, /dev/null and the end of a pipe."""
    os.setsid()
    for number in (signal.SIGALRM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    null = os.open("/dev/null", os.O_RDWR)
    null, report_end = (os.dup(end) if end <= _REPORT_FD else end for end in (null, report_end))
    for end in (0, 1, 2):
        os.dup2(null, end)
    os.dup2(report_end, _REPORT_FD)
    os.closerange(_REPORT_FD + 1, max(256, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    os.chdir(place)
    os.environ.clear()
    sys.argv[:] = ["program.py"]


def _limit(job: Job, in_namespaces: bool) -> None:
    limits = {
        resource.RLIMIT_CPU: job["cpu_seconds"],
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_FSIZE: job["file_bytes"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
        # Without namespaces, all processes of the user count: none may be added.
        resource.RLIMIT_NPROC: _MAX_PROCESSES if in_namespaces else 0,
    }
    for which, limit in limits.items():
        hard = resource.getrlimit(which)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        try:
            resource.setrlimit(which, (value, value))
        except (OSError, ValueError):
            if sys.platform == "linux":  # macOS has no limit on address space
                raise


def _hook(place: str) -> typing.Callable[[str, tuple[typing.Any, ...]], None]:
    """Return an audit hook that refuses what a test doesn't need."""
    inside = os.path.realpath(place) + os.sep

    def refuse(event: str, arguments: tuple[typing.Any, ...]) -> None:
        if event.startswith(_FORBIDDEN):
            raise PermissionError(f"{event} is not allowed in the sandbox")
        if event == "open" and (arguments[2] or 0) & _WRITING and not isinstance(arguments[0], int):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not path.startswith(inside) and path != os.devnull:
                raise PermissionError(f"{path} is not writable for sandboxed programs")

    return refuse


def _drop_capabilities() -> None:
    """Drop all capabilities, so that nothing can be mounted again."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())


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


def _reply(descriptor: int, reply: dict[str, object]) -> None:
    os.write(descriptor, json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
