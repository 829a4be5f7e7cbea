"""Takes from Python what only Linux or only POSIX has; on PYTHONPATH, each interpreter runs it.

What is left is what macOS and Windows have, too: see tests/serving/server/test_platforms.py.
"""

import asyncio
import builtins
import errno
import fcntl
import io
import mmap
import os
import signal
import stat
import subprocess
import sys
from typing import Any, NoReturn

import zmq

flags_of = fcntl.fcntl
for module in ("fcntl", "grp", "pwd", "resource", "syslog", "termios"):
    sys.modules[module] = None  # type: ignore[assignment]

for name in (
    *("getloadavg", "getpriority", "setpriority", "statvfs", "sysconf"),
    *("getegid", "geteuid", "getgroups", "killpg"),
    *("pread", "preadv", "pwrite", "pwritev"),
    *(name for name in dir(os) if name.startswith(("posix_f", "sched_"))),
):
    delattr(os, name)

for name in [name for name in dir(mmap) if name.startswith("MADV_")]:
    delattr(mmap, name)

for name in ("SIGHUP", "pthread_sigmask", "setitimer"):
    delattr(signal, name)


def refuse(*_: object) -> NoReturn:
    raise NotImplementedError


for kind in (asyncio.BaseEventLoop, asyncio.SelectorEventLoop):
    kind.add_signal_handler = refuse  # type: ignore[attr-defined]
    kind.remove_signal_handler = refuse  # type: ignore[attr-defined]

synced, sent = os.fsync, subprocess.Popen.send_signal


def sync_what_can_be_written(file: int) -> None:
    can_write = flags_of(file, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR)
    if not can_write and not stat.S_ISDIR(os.fstat(file).st_mode):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    synced(file)


def end_only(process: Any, number: int) -> None:
    if number not in (signal.SIGTERM, signal.SIGKILL):
        raise ValueError(number)
    sent(process, number)


os.fsync = sync_what_can_be_written
subprocess.Popen.send_signal = end_only  # type: ignore[method-assign]

has, opened = zmq.has, io.open
zmq.has = lambda capability: capability != "ipc" and has(capability)


def open_portably(file: Any, *arguments: Any, **options: Any) -> Any:
    if str(file).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(file)
    return opened(file, *arguments, **options)


io.open = builtins.open = open_portably
