"""Whether products may run on AMX, and where: choices that change no bit of any result.

The state of AMX's tile registers is 8 KiB per thread, so Linux saves it only for a process that has
asked. The permission holds for all threads, those that are running included, until the process ends
or executes another program. Without it a tile instruction ends the program. (The kernel's
documentation, "Using XSTATE features in user space applications".)
"""

import ctypes
import errno
import logging
import os
import platform
from enum import Enum
from functools import cache

from numba.core.registry import cpu_target

from midfill.errors import MidfillError
from midfill.kernels.cpu.amx_products import AMX_FEATURE
from midfill.kernels.cpu.simd import has_feature

_log = logging.getLogger(__name__)

AMX_VARIABLE = "MIDFILL_AMX"


class AmxUse(Enum):
    """Where AMX multiplies: nowhere, where it was measured to be faster, or wherever it can."""

    OFF = "off"
    AUTO = "auto"
    ON = "on"


def choose_amx() -> AmxUse:
    """Return how this process may use AMX, after asking the kernel for permission.

    The environment variable MIDFILL_AMX may say "off", "auto" or "on". Not set it is "off", since
    these products have run on an emulator alone so far; on a chip with AMX the log says so once.
    Where the chip has no AMX, or the kernel denies it to this process, "auto" means "off".

    Raises:
        MidfillError: MIDFILL_AMX is none of these, or "on" where AMX can't be used.
    """
    wanted = os.environ.get(AMX_VARIABLE)
    if wanted is None:
        if has_feature(cpu_target.target_context, AMX_FEATURE):
            _log_once(
                logging.INFO,
                "this chip has AMX, which is not used: its products have run on an emulator"
                f" alone so far; {AMX_VARIABLE}=auto uses it where it is measured to be faster",
            )
        return AmxUse.OFF
    try:
        use = AmxUse(wanted)
    except ValueError:
        raise MidfillError(
            f"{AMX_VARIABLE}={wanted} is not known: it can be auto, on or off"
        ) from None
    if use is AmxUse.OFF:
        return use
    reason = None
    if not has_feature(cpu_target.target_context, AMX_FEATURE):
        reason = "this chip has no AMX"
    elif (denied := request_amx()) is not None:
        reason = f"this chip has AMX, but the system denies it to this process ({denied})"
        if use is AmxUse.AUTO:
            _log_once(logging.WARNING, f"{reason}: products use other instructions")
    if reason is None:
        return use
    if use is AmxUse.ON:
        raise MidfillError(f"{AMX_VARIABLE}=on is not possible: {reason}; use auto or off")
    return AmxUse.OFF


@cache
def _log_once(level: int, message: str) -> None:
    _log.log(level, "%s", message)


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
