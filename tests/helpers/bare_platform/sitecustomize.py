"""Takes from Python what only Linux or only POSIX has; on PYTHONPATH, each interpreter runs it.

What is left is what macOS and Windows have, too: see tests/serving/server/test_platforms.py.
"""

import asyncio
import builtins
import io
import os
import signal
import sys
from typing import Any, NoReturn

import zmq

for module in ("fcntl", "grp", "pwd", "resource", "syslog", "termios"):
    sys.modules[module] = None  # type: ignore[assignment]

for name in (
    *("getloadavg", "getpriority", "setpriority", "statvfs", "sysconf"),
    *(name for name in dir(os) if name.startswith("sched_")),
):
    delattr(os, name)

for name in ("SIGHUP", "pthread_sigmask", "setitimer"):
    delattr(signal, name)


def refuse(*_: object) -> NoReturn:
    raise NotImplementedError


for kind in (asyncio.BaseEventLoop, asyncio.SelectorEventLoop):
    kind.add_signal_handler = refuse  # type: ignore[attr-defined]
    kind.remove_signal_handler = refuse  # type: ignore[attr-defined]

has, opened = zmq.has, io.open
zmq.has = lambda capability: capability != "ipc" and has(capability)


def open_portably(file: Any, *arguments: Any, **options: Any) -> Any:
    if str(file).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(file)
    return opened(file, *arguments, **options)


io.open = builtins.open = open_portably
