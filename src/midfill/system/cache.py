"""The folder for everything midfill keeps: models it fetched and data it derived from them.

Data derived from a model or from the kernels' source can always be made again. So a cache that
can't be written costs time and nothing else, and what nobody has used for a month is removed.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from uuid import uuid4

import platformdirs

_log = logging.getLogger(__name__)

_PARTIAL = ".partial"
_ABANDONED_SECONDS = 3600.0
_UNUSED_SECONDS = 30 * 86400.0


def cache_folder() -> Path:
    """The user's cache folder for midfill; the environment variable MIDFILL_CACHE overrides it."""
    override = os.environ.get("MIDFILL_CACHE")
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("midfill"))


def keep(path: Path, write: Callable[[Path], None]) -> None:
    """Put a file into the cache, whole or not at all; the first failure is logged as one line.

    Any number of processes may keep the same file at once: each writes one of its own and the
    last one's stays. Nobody ever reads a part of a file.

    Args:
        write: makes the file it is given; raises OSError where it can't.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex}{_PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        try:
            write(temporary)
            _sync(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        _warn_once(cache_folder(), error.strerror or str(error))


def mark_used(path: Path) -> None:
    """Put off the day on which ``forget_unused`` would remove a file or folder."""
    with suppress(OSError):
        os.utime(path)


def forget_unused(folder: Path) -> None:
    """Remove the files and folders in a folder that nobody has made or used for a month."""
    with suppress(OSError):
        for entry in folder.iterdir():
            if time.time() - entry.lstat().st_mtime <= _UNUSED_SECONDS:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove what processes left behind that were killed as they wrote."""
    for partial in folder.glob(f".*{_PARTIAL}"):
        if time.time() - partial.stat().st_mtime > _ABANDONED_SECONDS:
            partial.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Bring a file to the disk, so that a power cut doesn't leave its name without its bytes."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@cache
def _warn_once(folder: Path, reason: str) -> None:
    _log.warning(
        "can't write to the cache folder %s (%s): every start packs weights and compiles kernels "
        "again; set MIDFILL_CACHE to a folder that can be written",
        folder,
        reason,
    )
