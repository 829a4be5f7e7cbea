"""Files and folders that appear complete or not at all, and pages of memory-mapped files.

Content is written under a temporary name beside the target, flushed to the disk and then renamed:
so nothing is half written, even if the process is killed.
"""

import mmap
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from midfill.errors import MidfillError

if TYPE_CHECKING:  # the command line writes files, and starts without numpy
    import numpy.typing as npt

_HAS_LOCKS = find_spec("fcntl") is not None  # not on Windows
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.partial")
_ABANDONED_SECONDS = 3600.0
_UNLOCKED_SECONDS = 60.0
"""More than a writer takes from making a file to locking it."""


@contextmanager
def replacing_file(target: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yield a temporary path; the file written there replaces ``target`` when the block ends.

    If the block raises, the temporary file is removed and ``target`` stays as it was. The folder is
    created if needed. Any number of processes may replace the same file at once: each writes a
    temporary file of its own, locked as long as it writes, and the last one wins. Files left behind
    by killed processes, which nobody locks, are removed when another is written beside them.

    Args:
        target: the file.
        mode: permissions of the temporary file, less those that the process' umask takes away.

    Raises:
        OSError: the folder or the file can't be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target.parent)
    temporary = target.with_name(f".{target.name}.{uuid4().hex}.partial")
    try:
        with _locked(temporary, mode):
            yield temporary
            rename_synced(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path, mode: int) -> Iterator[None]:
    """Create a file and hold a lock on it, where the system has such locks."""
    path.touch(mode)
    if not _HAS_LOCKS:
        yield
        return
    import fcntl

    with path.open("rb") as file:
        with suppress(OSError):  # some network file systems have none
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _is_locked(path: Path) -> bool | None:
    """Return whether a process holds a lock on a file; None if the system can't tell."""
    if not _HAS_LOCKS:
        return None
    import fcntl

    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return None
    return False


def rename_synced(path: Path, target: Path) -> None:
    """Flush a complete file or folder to the disk, then rename it, replacing ``target``.

    Both are flushed: what has the name, since a power cut could leave the name without the bytes,
    and the folder that holds the name, since it could otherwise take the name back.

    Raises:
        OSError: one of them can't be done.
    """
    for each in (*path.rglob("*"), path) if path.is_dir() else (path,):
        _flush(each)
    os.replace(path, target)
    _flush(target.parent)


def _flush(path: Path) -> None:
    """Write what a system holds of a file, or of a folder's names, to the disk."""
    is_folder = path.is_dir()
    if os.name == "nt" and is_folder:
        return  # Windows opens no folders
    # It flushes nothing, either, through a handle that can't write.
    handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(target: Path, content: str) -> None:
    """Write a UTF-8 text file; its folder is created if needed.

    Raises:
        MidfillError: it can't be written; the previous file stays.
    """
    with _reporting_failures(target, ()), replacing_file(target) as temporary:
        temporary.write_text(content, encoding="utf-8", newline="")


def write_folder(
    target: Path, write: Callable[[Path], None], *, errors: tuple[type[Exception], ...] = ()
) -> None:
    """Let ``write`` fill a folder that gets its name once it is complete.

    One process at a time may write the same folder.

    Args:
        target: the folder; replaced if it exists.
        write: fills the empty folder it is given.
        errors: what ``write`` raises for a full disk beside OSError.

    Raises:
        MidfillError: something can't be written; nothing is left behind, the previous folder stays.
    """
    temporary = target.with_name(f".{target.name}.writing")
    with _reporting_failures(target, errors):
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            write(temporary)
            _apply_default_mode(temporary)
            _replace_folder(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _apply_default_mode(folder: Path) -> None:
    """Give all files the mode of new ones; safetensors creates its files for the owner alone."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _replace_folder(temporary: Path, target: Path) -> None:
    if not target.exists():
        rename_synced(temporary, target)
        return
    previous = target.with_name(f".{target.name}.old")
    shutil.rmtree(previous, ignore_errors=True)
    os.replace(target, previous)
    rename_synced(temporary, target)
    shutil.rmtree(previous, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove temporary files of processes that were killed while they wrote."""
    for path in folder.glob(".*.partial"):
        with suppress(OSError):
            if not _TEMPORARY.fullmatch(path.name):
                continue
            age = time.time() - path.stat().st_mtime
            locked = _is_locked(path)
            if locked:
                continue
            if age > (_ABANDONED_SECONDS if locked is None else _UNLOCKED_SECONDS):
                path.unlink(missing_ok=True)


@contextmanager
def _reporting_failures(target: Path, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Turn failures to write into a MidfillError of one line."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (OSError, *errors)):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        first_line = str(reason).partition("\n")[0]
        raise MidfillError(
            f"{target}: can't be written: {first_line}; what was there before stays"
        ) from None


def release_pages(array: "npt.NDArray[Any]") -> None:
    """Let the system have back what was read of the mapped file that an array views.

    What is needed again is read again. Does nothing for other arrays.
    """
    owner = _map_of(array)
    if owner is not None and hasattr(mmap, "MADV_DONTNEED"):
        owner.madvise(mmap.MADV_DONTNEED)


def read_ahead(array: "npt.NDArray[Any]") -> None:
    """Have the system read what a contiguous array views of a mapped file, without waiting.

    Does nothing for other arrays.
    """
    owner = _map_of(array)
    if owner is None or not hasattr(mmap, "MADV_WILLNEED"):
        return
    import numpy as np

    start = array.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    with suppress(OSError):  # a file system without it
        owner.madvise(mmap.MADV_WILLNEED, first, start + array.nbytes - first)


def madvise_address() -> int:
    """Return the address of the C function madvise, for compiled code; 0 where there is none."""
    import ctypes

    try:
        return ctypes.cast(ctypes.CDLL(None).madvise, ctypes.c_void_p).value or 0
    except (AttributeError, OSError, TypeError):  # Windows has no such function, and no CDLL(None)
        return 0


def _map_of(array: "npt.NDArray[Any]") -> mmap.mmap | None:
    """Return the mapped file that an array views, None if it is in memory."""
    import numpy as np

    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    return owner if isinstance(owner, mmap.mmap) else None
