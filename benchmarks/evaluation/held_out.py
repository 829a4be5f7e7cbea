"""Packages whose files no adapter of midfill was trained on, and that evaluations therefore use.

Versions are pinned, so that everybody cuts holes into the same texts.
"""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.package_sources import fetch_packages, read_requirements
from midfill.system.progress import Progress

LISTS = Path(__file__).parents[2] / "recipes" / "smollm2-135m-fim" / "held_out"

SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "python": (".py",),
    "javascript": (".js",),
    "typescript": (".ts",),
    "go": (".go",),
    "rust": (".rs",),
    "c": (".c", ".h"),
}
"""Suffixes of the files of each language; the list of its packages is called LANGUAGE.txt."""


def fetch_held_out(folder: Path, progress: Progress) -> None:
    """Fetch the files of all packages into ``folder``/LANGUAGE.

    Packages that are there are kept.

    Raises:
        MidfillError: a package can't be fetched.
    """
    for language, suffixes in SUFFIXES.items():
        packages = read_requirements(LISTS / f"{language}.txt")
        fetch_packages(packages, folder / language, suffixes, progress)
