"""Folders of the warm tier: chunks of KV as files, bounded, the least recently used removed first.

A file appears whole or not at all: it is written under another name, flushed where the folder is
to survive a power cut, and renamed. Its name is the chunk's key, and what it holds is checked by
whoever loads it. A ``ChunkFolder`` belongs to one process at a time and is private to the user.

On disk, each model has a folder, and all of them are bounded together; several servers of one model
have a folder each. In main memory, a folder lives as long as its server: so an engine that is
killed leaves its files to the next one. A server that is killed leaves the folder; the next server
of the same user removes it.
"""

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import filelock

from midfill.errors import MidfillError, OptionError
from midfill.system.cache import mark_used
from midfill.system.files import rename_synced

_SUFFIX, _PARTIAL = ".kv", ".partial"
_KEY_BYTES = 32
SHARED_MEMORY = Path("/dev/shm")
_MEMORY_PREFIX = "midfill-kv-"
_OWNER, _LOCK = "owner", "lock"
_MODEL_NAME = re.compile(r"[0-9a-f]{32}(-\d+)?")
_MAX_SERVERS = 64  # of one model on one machine
_OTHERS_SHARE = 0.5  # of the space, at most, for models that aren't served now
_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ROOM_ON_A_FULL_DISK = (1, 2, 4)  # times what is to be written, one after the other


class FolderInUseError(MidfillError):
    """Another process uses a folder."""


class ChunkFolder:
    """Files of chunks by key. Any thread may call it.

    Attributes:
        path: the folder.
        capacity: maximum bytes of all files together.
        evicted_chunks: how many were removed to make room, since the start.
    """

    def __init__(self, path: Path, capacity: int, *, durable: bool) -> None:
        """Open a folder, creating it if needed, and see what it holds.

        Args:
            path: the folder.
            capacity: maximum bytes of all files together; what exceeds it is removed at once.
            durable: flush files to the disk before they get their names.

        Raises:
            FolderInUseError: another process uses it.
            MidfillError: it can't be used.
        """
        self.path = path
        self.capacity = capacity
        self.evicted_chunks = 0
        self._durable = durable
        self._mutex = threading.Lock()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._used = 0
        self._writes = 0
        self._unfinished: tuple[Path, int] | None = None  # the file that is being written, its size
        self._closed = False
        make_private(path)
        try:
            self._lock = _locked(path)
            self._lock.acquire()
        except filelock.Timeout:
            raise FolderInUseError(
                f"{path} is in use by another server of this model; give this one a folder of its"
                " own with --warm-tier-folder"
            ) from None
        except OSError as error:
            raise _unusable(path, error) from None
        self._scan()

    def __contains__(self, key: bytes) -> bool:
        """Whether a chunk is there; changes nothing."""
        return key in self._sizes

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self._sizes)

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, with the one that is being written."""
        unfinished = self._unfinished
        return self._used + (0 if unfinished is None else unfinished[1])

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark the chunks of a text as just used, those that are there.

        A chunk is of no use without those before it, so the text's last one goes first.
        """
        with self._mutex:
            for key in reversed(keys):
                if key in self._sizes:
                    self._sizes.move_to_end(key)

    def store(self, key: bytes, content: bytes, before: Sequence[bytes] = ()) -> bool:
        """Write a chunk, removing others to make room. One thread at a time may store.

        The disk may be full before the folder is, since others write to it, too. Then chunks make
        room there as well, a few times as many as would be enough at most.

        Args:
            key: its name.
            content: what its file will hold.
            before: the chunks before it in its text; they are marked as just used.

        Returns:
            Whether it is stored: what is larger than the folder may be is not, nor is anything in a
            folder that is closed, or is closed meanwhile.

        Raises:
            OSError: it can't be written; nothing of it is left.
        """
        if len(content) > self.capacity:
            return False
        self.touch(before)
        self._make_room(self.capacity - len(content))
        for times in (*_ROOM_ON_A_FULL_DISK, 0):
            try:
                self._write(key, content)
                break
            except OSError as error:
                if self._closed:
                    return False
                wanted = times * len(content)
                if error.errno not in _FULL or not self._sizes or not wanted:
                    raise
                self._make_room(max(0, self._used - wanted))
        self.touch((*before, key))
        if self._durable:
            self._date((*before, key))
        return True

    def _write(self, key: bytes, content: bytes) -> None:
        """Write a file under another name and give it its own.

        Raises:
            OSError: see ``store``, or the folder is closed.
        """
        self._writes += 1
        partial = self.path / f".{key.hex()}.{os.getpid()}.{self._writes}{_PARTIAL}"
        try:
            with self._mutex:
                if self._closed:
                    raise OSError("the folder is closed")
                handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE_FILE)
                self._unfinished = partial, len(content)
            with os.fdopen(handle, "wb", buffering=0) as file:
                _write_all(file.fileno(), content)
            if self._durable:
                rename_synced(partial, self._file(key))
            else:
                partial.rename(self._file(key))
        except BaseException:
            _unlink(partial)
            if key not in self._sizes:
                _unlink(self._file(key))  # it has its name, but not for certain
            with self._mutex:
                self._unfinished = None
            raise
        with self._mutex:
            self._unfinished = None
            self._used += len(content) - self._sizes.pop(key, 0)
            self._sizes[key] = len(content)

    def _date(self, keys: Sequence[bytes]) -> None:
        """Have the next process find the chunks of a text in the order of ``touch``."""
        now = time.time()
        for depth, key in enumerate(keys):
            with contextlib.suppress(OSError):
                os.utime(self._file(key), (now, now - depth))

    def load(self, key: bytes) -> bytes | None:
        """Return what a chunk's file holds and mark it as just used; None if there is no such file.

        Nothing is known of the content. A file that others could have written is removed.
        """
        if key not in self._sizes:
            return None
        try:
            handle = os.open(self._file(key), os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
            with os.fdopen(handle, "rb", buffering=0) as file:
                status = os.fstat(handle)
                content = file.read() if _is_private(status) else b""
            os.utime(self._file(key))
        except OSError:
            content = b""
        if not content:
            self.remove(key)
            return None
        self.touch((key,))
        return content

    def remove(self, key: bytes) -> None:
        """Remove a chunk, if it is there. A file that can't be removed counts, but isn't used."""
        removed = _unlink(self._file(key))
        with self._mutex:
            size = self._sizes.pop(key, 0)
            self._used -= size if removed else 0

    def shrink(self, capacity: int) -> None:
        """Set the maximum of bytes, removing what exceeds it."""
        self.capacity = capacity
        self._make_room(capacity)

    def close(self) -> None:
        """Let other processes use the folder; of a file that is being written nothing is left."""
        with self._mutex:
            self._closed = True
            if self._unfinished is not None:
                _unlink(self._unfinished[0])
        self._lock.release()

    def _make_room(self, most: int) -> None:
        """Remove chunks until the others have at most so many bytes."""
        while self._used > most and self._sizes:
            with self._mutex:
                oldest = next(iter(self._sizes))
            self.remove(oldest)
            self.evicted_chunks += 1

    def _scan(self) -> None:
        """Find the files of earlier processes; remove what a killed one left unfinished."""
        found: list[tuple[float, bytes, int]] = []
        try:
            remove_unfinished(self.path)
            with os.scandir(self.path) as entries:
                for entry in entries:
                    if (key := _key(entry.name)) is not None:
                        status = entry.stat(follow_symlinks=False)
                        found.append((status.st_mtime, key, status.st_size))
        except OSError as error:
            raise _unusable(self.path, error) from None
        for _, key, size in sorted(found):
            self._sizes[key] = size
            self._used += size
        self._make_room(self.capacity)

    def _file(self, key: bytes) -> Path:
        return self.path / f"{key.hex()}{_SUFFIX}"


def remove_unfinished(path: Path) -> None:
    """Remove what killed processes left unfinished in a folder that no process uses.

    Raises:
        OSError: it can't be read or written.
    """
    for entry in path.iterdir():
        if entry.name.endswith(_PARTIAL):
            entry.unlink(missing_ok=True)


def make_private(path: Path) -> None:
    """Create a folder that only this user can look into; one that exists has to be so.

    Raises:
        MidfillError: it can't be created, or others can look into it.
    """
    try:
        path.mkdir(_PRIVATE_FOLDER, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise _unusable(path, error) from None
    if not _is_private(status) or status.st_mode & 0o077:
        raise MidfillError(
            f"{path} holds KV, from which text can be read, but others may look into it; make it"
            f" yours alone (chmod 700), or name another with --warm-tier-folder"
        )


def _unusable(path: Path, error: OSError) -> MidfillError:
    return MidfillError(f"{path} can't be used for the warm tier: {error.strerror or error}")


def _is_private(status: os.stat_result) -> bool:
    """Return whether something is this user's and nobody else may write to it."""
    if not hasattr(os, "geteuid"):
        return True
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid == os.geteuid() and not others_write


def _is_own_folder(path: Path) -> bool:
    """Return whether a path is a folder, no link to one, in which only this user can write.

    In others' folders nothing is opened, not even a lock: it may be a link to this user's file.
    """
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and _is_private(status)


def _key(name: str) -> bytes | None:
    """Return the key of a chunk's file; None for other files."""
    with contextlib.suppress(ValueError):
        key = bytes.fromhex(name.removesuffix(_SUFFIX))
        if name == f"{key.hex()}{_SUFFIX}" and len(key) == _KEY_BYTES:
            return key
    return None


def _unlink(path: Path) -> bool:
    """Remove a file; return whether it is gone."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        return True
    return False


def _write_all(handle: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]


def open_disk_folder(folder: Path, name: str, size: int) -> ChunkFolder:
    """Open a model's folder of chunks, creating it if needed.

    What other models left counts, too: the least recently used are removed until at most half of
    the space is theirs. Those that another server is using have space of their own.

    Args:
        folder: the folder of all models.
        name: of the model, see ``KvIdentity.name``.
        size: bytes for all.

    Raises:
        MidfillError: it can't be used.
    """
    if not folder.exists():
        make_private(folder)
    opened = _open_first_free(folder, name, size)
    opened.shrink(size - _shrink_others(folder, opened.path, int(_OTHERS_SHARE * size)))
    mark_used(opened.path)
    return opened


def _open_first_free(folder: Path, name: str, size: int) -> ChunkFolder:
    for number in range(1, _MAX_SERVERS):
        with suppress(FolderInUseError):
            path = folder / (name if number == 1 else f"{name}-{number}")
            return ChunkFolder(path, size, durable=True)
    return ChunkFolder(folder / name, size, durable=True)


def _shrink_others(folder: Path, own: Path, size: int) -> int:
    """Remove folders of other models until they have at most ``size`` bytes; return how many."""
    others: list[tuple[float, int, Path]] = []
    with suppress(OSError):
        for path in folder.iterdir():
            if path != own and _MODEL_NAME.fullmatch(path.name) and _is_own_folder(path):
                with suppress(OSError, filelock.Timeout), _locked(path):
                    remove_unfinished(path)
                    used = sum(file.lstat().st_size for file in path.iterdir())
                    others.append((path.stat().st_mtime, used, path))
    total = sum(used for _, used, _ in others)
    for _, used, path in sorted(others):
        if total <= size:
            break
        with suppress(OSError, filelock.Timeout), _locked(path):
            shutil.rmtree(path, ignore_errors=True)
            total -= used
    return total


def _locked(path: Path, name: str = _LOCK) -> filelock.BaseFileLock:
    """Return a lock that is free while no server uses a folder.

    Raises:
        OSError: it is a link; filelock before 3.20.1 empties the file that a link names.
    """
    if (path / name).is_symlink():
        raise OSError(errno.ELOOP, "its lock is a link")
    return filelock.FileLock(path / name, blocking=False)


class MemoryFolder:
    """A private folder of a file system in memory.

    Attributes:
        path: the folder.
    """

    def __init__(self, size: int, parent: Path = SHARED_MEMORY) -> None:
        """Create a folder, and remove those that killed servers left.

        Args:
            size: bytes that will be written there at most.
            parent: where it is created.

        Raises:
            OptionError: there is no file system in memory, or too little room in it.
            MidfillError: it can't be written.
        """
        if not parent.is_dir():
            raise OptionError(
                f"--warm-tier-memory needs {parent}, a file system in memory, which this system"
                " doesn't have; --warm-tier-disk works everywhere"
            )
        _remove_abandoned(parent)
        free = shutil.disk_usage(parent).free
        if free < size:
            raise OptionError(
                f"--warm-tier-memory is {size >> 20} MB, but {parent} has only {free >> 20} MB"
                " left; give less, or enlarge it (in a container: --shm-size)"
            )
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_MEMORY_PREFIX, dir=parent))
        except OSError as error:
            raise MidfillError(f"{parent} can't be written: {error.strerror}") from None
        self._lock = _locked(self.path, _OWNER)
        self._lock.acquire()

    def remove(self) -> None:
        """Remove the folder and all it holds."""
        self._lock.release()
        shutil.rmtree(self.path, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_MEMORY_PREFIX}*"):
        with suppress(OSError, filelock.Timeout):
            if not _is_own_folder(folder) or not (folder / _OWNER).is_file():
                continue  # somebody else's, or another server is creating it
            with _locked(folder, _OWNER):
                shutil.rmtree(folder, ignore_errors=True)
