"""Permission to use AMX, the tile registers of Intel's server chips.

Their state is 8 KiB per thread, so Linux saves it only for a process that has asked. The permission
holds for all threads, those that are running included, until the process ends or executes another
program. Without it a tile instruction ends the program. (The kernel's documentation, "Using XSTATE
features in user space applications".)
"""

import ctypes
import errno
import os
import platform
from functools import cache

_ARCH_PRCTL = 158
_GET_PERMISSION, _REQUEST_PERMISSION = 0x1022, 0x1023
_TILE_DATA = 18
"""Number of the tiles' part of a thread's state."""


@cache
def request_amx() -> str | None:
    """Ask for the permission, once per process.

    Returns:
        None if it is granted, else why not.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "only Linux on x86-64 is asked"
    libc = ctypes.CDLL(None, use_errno=True)
    if _arch_prctl(libc, _REQUEST_PERMISSION, ctypes.c_long(_TILE_DATA)) != 0:
        number = ctypes.get_errno()
        if number == errno.ENOSPC:
            return "a thread's signal stack has no room for the tiles"
        return os.strerror(number)
    granted = ctypes.c_uint64(0)
    if _arch_prctl(libc, _GET_PERMISSION, ctypes.byref(granted)) != 0:
        return os.strerror(ctypes.get_errno())
    return (
        None if granted.value >> _TILE_DATA & 1 else "the kernel has not granted what it agreed to"
    )


def _arch_prctl(libc: ctypes.CDLL, code: int, argument: object) -> int:
    return int(libc.syscall(ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(code), argument))
