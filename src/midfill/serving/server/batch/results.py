"""ResultFile: the results of a batch, appended row by row, and what of them is there after a kill.

A row is written at once and whole. If the disk is full, what was written of it is taken back; if
the process is killed or the machine stops amid a row, the next opening cuts it off. So each row of
the input has one result in the end, and none is computed twice but those that were in progress.
"""

import math
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from midfill.errors import MidfillError
from midfill.serving.server.batch.rows import ID_PREFIX, RowResult

_START = f'{{"id":"{ID_PREFIX}'.encode()


class ResultFile:
    """The results of a batch.

    Attributes:
        path: the file.
        done: the ids of the rows that have a result.
        failed: how many of these are errors.
    """

    def __init__(self, path: Path, room: Callable[[], float] = lambda: math.inf) -> None:
        """Open the file, or make it.

        Args:
            path: the file.
            room: returns how many bytes may be added now.

        Raises:
            MidfillError: it can't be written, holds something else, or another process writes it.
        """
        self.path = path
        self._room = room
        self.done: set[str] = set()
        self.failed = 0
        # Windows locks regions of a file even from its own process, so the lock is another file.
        self._lock_path = path.with_name(f".{path.name}.lock")
        self._lock = FileLock(self._lock_path, timeout=0, thread_local=False)
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
        try:
            self._handle = os.open(path, flags, 0o666)
        except OSError as error:
            raise self._failure(error) from None
        try:
            self._lock.acquire()
        except (Timeout, OSError) as error:
            os.close(self._handle)
            if isinstance(error, Timeout):
                raise MidfillError(f"{path}: another process is writing it") from None
            raise self._failure(error) from None
        try:
            self._size = self._read()
        except BaseException:
            self.close()
            raise

    def check_belongs(self, ids: Collection[str]) -> None:
        """Check that all results are of rows of the input, and cut off what is not complete.

        Args:
            ids: of all rows of the input.

        Raises:
            MidfillError: some are not; the file stays as it is.
        """
        known = set(ids)
        if not self.done <= known:
            raise MidfillError(
                f"{self.path}: has results of other rows than the input's;"
                " name another output, or remove it"
            )
        try:
            os.ftruncate(self._handle, self._size)
            os.lseek(self._handle, self._size, os.SEEK_SET)
        except OSError as error:
            raise self._failure(error) from None

    def append(self, result: RowResult) -> None:
        """Add a result.

        Raises:
            MidfillError: it can't be written; those before stay.
        """
        line = memoryview(msgspec.json.encode(result) + b"\n")
        size = len(line)
        if size > self._room():
            raise MidfillError(f"there is no room for more than {len(self.done)} results")
        try:
            while line:
                line = line[os.write(self._handle, line) :]
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._handle, self._size)
                os.lseek(self._handle, self._size, os.SEEK_SET)
            raise MidfillError(
                f"{self.path}: can't be written: {error.strerror}; its {len(self.done)} rows stay,"
                " and the same command goes on after them"
            ) from None
        self._size += size
        self._record(result)

    def close(self) -> None:
        """Flush the file to the disk, and close it.

        Raises:
            MidfillError: it can't be flushed.
        """
        try:
            os.fsync(self._handle)
        except OSError as error:
            raise self._failure(error) from None
        finally:
            os.close(self._handle)
            self._unlock()

    def _read(self) -> int:
        """Take note of the rows that are complete; return their size in bytes.

        Raises:
            MidfillError: the file holds something else.
        """
        size = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    if not (line.startswith(_START) or _START.startswith(line)):
                        raise self._foreign(number)
                    break
                try:
                    row = msgspec.json.decode(line, type=RowResult)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    raise self._foreign(number) from None
                self._record(row)
                size += len(line)
        return size

    def _record(self, row: RowResult) -> None:
        self.done.add(row.id)
        self.failed += not row.succeeded

    def _foreign(self, number: int) -> MidfillError:
        return MidfillError(
            f"{self.path}: line {number} is no result of a batch; name another output, or remove it"
        )

    def _failure(self, error: OSError) -> MidfillError:
        return MidfillError(f"{self.path}: can't be written: {error.strerror}")

    def _unlock(self) -> None:
        with suppress(OSError):
            self._lock_path.unlink(missing_ok=True)
        self._lock.release()
