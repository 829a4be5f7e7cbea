"""The cache folder: models that midfill downloaded, and data it derived from them.

Data derived from a model or from the kernels' source can always be computed again. A cache that
can't be written therefore costs nothing but time. Entries that have not been used for a month are
removed.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import platformdirs

from midfill.system.files import replacing_file

_log = logging.getLogger(__name__)

_UNUSED_SECONDS = 30 * 86400.0


def cache_folder() -> Path:
    """Return midfill's cache folder; the environment variable MIDFILL_CACHE overrides it."""
    override = os.environ.get("MIDFILL_CACHE")
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("midfill"))


def store_file(
    path: Path, write: Callable[[Path], object], mode: int = 0o666, *, quiet: bool = False
) -> None:
    """Put a file into the cache, complete or not at all; log the first failure as one line.

    Any number of processes may store the same file at once, see ``replacing_file``.

    Args:
        path: the file.
        write: writes the file at the path it is given; raises OSError where it can't.
        mode: see ``replacing_file``.
        quiet: log nothing, since the cache can do without.
    """
    try:
        with replacing_file(path, mode) as temporary:
            write(temporary)
    except OSError as error:
        if not quiet:
            _warn_once(cache_folder(), error.strerror or str(error))


def mark_used(path: Path) -> None:
    """Record that a file or folder is in use, so that ``remove_unused`` keeps it."""
    with suppress(OSError):
        os.utime(path)


def remove_unused(folder: Path) -> None:
    """Remove the files and folders in a folder that nobody has created or used for a month."""
    with suppress(OSError):
        for entry in folder.iterdir():
            if time.time() - entry.lstat().st_mtime <= _UNUSED_SECONDS:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


@cache
def _warn_once(folder: Path, reason: str) -> None:
    _log.warning(
        "can't write to the cache folder %s (%s): every start packs weights and compiles kernels "
        "again; set MIDFILL_CACHE to a folder that can be written",
        folder,
        reason,
    )
