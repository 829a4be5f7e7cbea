"""Packages whose files no adapter of midfill was trained on, and that evaluations therefore use.

Versions are pinned, so that everybody cuts holes into the same texts.
"""

from pathlib import Path

from benchmarks.package_sources import fetch_packages, read_requirements
from midfill.system.progress import Progress

_ROOT = Path(__file__).parents[2]
_PYTHON = _ROOT / "recipes" / "smollm2-135m-fim" / "held_out.txt"
_JAVASCRIPT = Path(__file__).with_name("javascript.txt")


def fetch_held_out(folder: Path, progress: Progress) -> tuple[Path, Path]:
    """Fetch the files of all packages into ``folder``/python and ``folder``/javascript.

    Packages that are there are kept.

    Returns:
        The folders python and javascript.

    Raises:
        MidfillError: a package can't be fetched.
    """
    python, javascript = folder / "python", folder / "javascript"
    fetch_packages(read_requirements(_PYTHON), python, (".py",), progress)
    fetch_packages(read_requirements(_JAVASCRIPT), javascript, (".js",), progress)
    return python, javascript
