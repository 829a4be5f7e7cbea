"""Other interpreters, with the libraries that peers are made of."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

from midfill.system.python_child import python_command, python_environment

_FIND = "import importlib.metadata as m; print(m.version({!r}))"


def find_interpreter(
    python: Path | None, distribution: str, module: str, program: str | None = None
) -> tuple[str, str] | None:
    """Return an interpreter that has a distribution, and its version there; None if none has it.

    Args:
        python: the interpreter that the user names; None searches for one.
        distribution: its name.
        module: which it installs; where this interpreter has it, this one is tried.
        program: which it installs; the interpreter beside the one on PATH is tried first.
    """
    if python is not None:
        candidates = [str(python)]
    else:
        found = None if program is None else shutil.which(program)
        # pip installs scripts beside their interpreter.
        candidates = [] if found is None else [str(Path(found).parent / "python")]
        if importlib.util.find_spec(module) is not None:
            candidates.append(python_command()[0])
    for candidate in candidates:
        try:
            said = subprocess.run(
                [candidate, "-c", _FIND.format(distribution)],
                env=python_environment(),
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if said.returncode == 0:
            return candidate, said.stdout.strip()
    return None
