"""pip as a subprocess: it honours the user's package index, mirrors and credentials."""

import importlib.metadata
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from midfill.errors import MidfillError
from midfill.system.python_child import python_command, python_environment


def run_pip(
    arguments: list[str], on_line: Callable[[str], None] = lambda line: None
) -> tuple[int, str, str]:
    """Run pip; return its exit status and what it wrote to stdout and stderr.

    Args:
        arguments: the command and its options.
        on_line: called with each line that pip writes to stdout.

    Raises:
        MidfillError: this Python has no pip.
    """
    command = python_command(*_pip(), "--disable-pip-version-check", "--no-input")
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            [*command, *arguments],
            env=python_environment(),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
        ) as process,
    ):
        output = []
        for line in process.stdout or ():
            output.append(line)
            on_line(line)
        code = process.wait()
        errors.seek(0)
        complaint = errors.read()
    if "No module named pip" in complaint:
        raise MidfillError(
            f"pip is needed for downloads and {command[0]} has none; run: {command[0]} -m ensurepip"
        )
    return code, "".join(output), complaint


def pip_version() -> tuple[int, int]:
    """Return the major and minor version of the pip that ``run_pip`` runs, (0, 0) for none."""
    if importlib.util.find_spec("pip") is not None:
        version = importlib.metadata.version("pip")
    else:
        bundled = _bundled_pip()
        version = bundled.name.split("-")[1] if bundled is not None else "0.0"
    major, minor = version.split(".")[:2]
    return int(major), int(re.sub(r"\D.*", "", minor) or 0)


def _pip() -> list[str]:
    """Return how Python runs pip: the one that is installed, or the one in Python's own library.

    Environments of uv and pipx have none installed.
    """
    bundled = _bundled_pip() if importlib.util.find_spec("pip") is None else None
    return ["-m", "pip"] if bundled is None else [str(bundled / "pip")]


def _bundled_pip() -> Path | None:
    library = importlib.util.find_spec("ensurepip")
    folder = Path(library.origin if library is not None and library.origin else "").parent
    return max(folder.glob("_bundled/pip-*.whl"), default=None)


def summarise_failure(complaint: str) -> str:
    """Return the line of pip's stderr that says why it failed."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it gave no reason"])[-1].removeprefix("ERROR:").strip()
