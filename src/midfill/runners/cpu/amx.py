"""Whether products may run on AMX, and where: choices that change no bit of any result."""

import logging
import os
from enum import Enum
from functools import cache

from numba.core.registry import cpu_target

from midfill.errors import MidfillError
from midfill.kernels.cpu.amx_products import AMX_FEATURE
from midfill.kernels.cpu.simd import has_feature
from midfill.system.amx import request_amx

_log = logging.getLogger(__name__)

AMX_VARIABLE = "MIDFILL_AMX"


class AmxUse(Enum):
    """Where AMX multiplies: nowhere, where it was measured to be faster, or wherever it can."""

    OFF = "off"
    AUTO = "auto"
    ON = "on"


def choose_amx() -> AmxUse:
    """Return how this process may use AMX, after asking the kernel for permission.

    The environment variable MIDFILL_AMX may say "off", "auto" (as if not set) or "on". Where the
    chip has no AMX, or the kernel denies it to this process, "auto" means "off".

    Raises:
        MidfillError: MIDFILL_AMX is none of these, or "on" where AMX can't be used.
    """
    wanted = os.environ.get(AMX_VARIABLE, AmxUse.AUTO.value)
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
            _warn_once(f"{reason}: products use other instructions")
    if reason is None:
        return use
    if use is AmxUse.ON:
        raise MidfillError(f"{AMX_VARIABLE}=on is not possible: {reason}; use auto or off")
    return AmxUse.OFF


@cache
def _warn_once(message: str) -> None:
    _log.warning("%s", message)
