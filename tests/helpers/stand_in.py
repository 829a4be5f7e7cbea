"""Programs that stand in for others."""

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

Program = Callable[[str], Path]
"""Makes a program of some Python."""


def write_program(path: Path, source: str) -> Path:
    """Write a program of some Python and make it executable."""
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(source)}")
    path.chmod(0o755)
    return path
