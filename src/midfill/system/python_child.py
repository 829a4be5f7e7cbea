"""Children that are Pythons: what starts any of them, so that none imports from the current folder.

``python -m`` and ``python -c`` look for modules in the current folder first, and so does an empty
entry of ``PYTHONPATH``. The current folder is whatever a user has opened, downloaded projects
included: a ``random.py`` in it would be run.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager

_SAFE_PATH = "PYTHONSAFEPATH"  # -P for a child's own children, and for other interpreters


def python_command(*arguments: str) -> list[str]:
    """Return the command that runs this interpreter; it takes ``python_environment``."""
    return [sys.executable, "-P", *arguments]


def python_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which Python imports nothing from the current folder.

    Folders that ``PYTHONPATH`` names are kept, as absolute paths; the current one is not, unless it
    is named by its absolute path. An empty entry, which ``PYTHONPATH=$PYTHONPATH:/folder`` makes,
    is meant by nobody.

    Args:
        environment: to begin with; None is this process's.
    """
    kept = dict(os.environ if environment is None else environment)
    folders = [
        os.path.abspath(folder)
        for folder in kept.pop("PYTHONPATH", "").split(os.pathsep)
        if os.path.normpath(folder or ".") != "."
    ]
    if folders:
        kept["PYTHONPATH"] = os.pathsep.join(folders)
    return {**kept, _SAFE_PATH: "1"}


@contextmanager
def libraries_start_python() -> Iterator[None]:
    """Give the children that a library starts in the block what ``python_environment`` gives.

    For ``multiprocessing``, whose children take this process's environment. It is changed for all
    threads.
    """
    before = dict(os.environ)
    wanted = python_environment()
    changed = {name for name in ("PYTHONPATH", _SAFE_PATH) if wanted.get(name) != before.get(name)}
    try:
        for name in changed:
            _set(name, wanted.get(name))
        yield
    finally:
        for name in changed:
            _set(name, before.get(name))


def _set(name: str, value: str | None) -> None:
    if value is None:
        del os.environ[name]
    else:
        os.environ[name] = value


def in_library_folder() -> chdir[str]:
    """Have the standard library's folder be the current one in the ``with`` block.

    For a library that has other processes import from the folder it is called in, as Ray does.
    """
    return chdir(sysconfig.get_path("stdlib"))
