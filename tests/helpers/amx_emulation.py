"""Programs on an emulated AMX: machine code with tile instructions runs on any x86-64 Linux.

amx/emulator.c is compiled with gcc and loaded into a program before it starts; kernels are compiled
for this chip with AMX.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from midfill.runners.cpu.amx import request_amx

SOURCE = Path(__file__).parent / "amx" / "emulator.c"
FEATURES = "+amx-tile,+amx-int8,+amx-bf16"


def reason_to_skip() -> str | None:
    """Return why AMX can't be emulated here; None if it can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "AMX is emulated on Linux on x86-64 only"
    if shutil.which("gcc") is None:
        return "the AMX emulator is compiled with gcc, which is not installed"
    if "+amx-tile" in _host_features():
        return "this chip has AMX: its instructions raise no signal that could be emulated"
    return None


def chip_has_amx() -> bool:
    """Return whether programs with tile instructions run here as they are."""
    features = set(_host_features().split(","))
    return {"+amx-tile", "+amx-int8"} <= features and request_amx() is None


def _host_features() -> str:
    # Not needed where nothing is emulated: numba may not be installed there.
    from numba.core.codegen import get_host_cpu_features

    return str(get_host_cpu_features())


def build_emulator(folder: Path) -> Path:
    """Compile the emulator and return the library."""
    library = folder / "amx_emulator.so"
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fPIC", "-shared"]
    subprocess.run(["gcc", *flags, "-o", library, SOURCE, "-lm"], check=True)
    return library


def run_on_amx(
    library: Path | None, program: Path | str, *arguments: str, permission: str = "granted",
    features: str | None = FEATURES, **environment: str,
) -> "subprocess.CompletedProcess[str]":  # fmt: skip
    """Run a Python program on the emulated chip.

    Args:
        library: the emulator; None runs the program on this chip, which has AMX.
        program: a file, or Python source.
        arguments: of the program.
        permission: what the kernel answers, see amx/emulator.c.
        features: added to those that kernels are compiled for; None is this chip as it is.
        environment: variables to set.
    """
    variables = dict(os.environ)
    if library is not None:
        variables |= {"LD_PRELOAD": str(library), "AMX_EMULATION": permission}
    if library is not None and features is not None:
        variables["NUMBA_CPU_NAME"] = "generic"
        variables["NUMBA_CPU_FEATURES"] = f"{_host_features()},{features}"
    command: Sequence[str | Path] = (
        [sys.executable, program] if isinstance(program, Path) else [sys.executable, "-c", program]
    )
    return subprocess.run(
        [*command, *arguments],
        env=variables | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
