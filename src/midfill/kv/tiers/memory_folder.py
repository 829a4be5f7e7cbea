"""A folder in main memory, for as long as a server lives.

Its owner is the server, so an engine that is killed leaves its files to the next one. A server that
is killed leaves the folder; the next server of the same user removes it.
"""

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import filelock

from midfill.errors import MidfillError, OptionError

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "midfill-kv-"
_OWNER = "owner"


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
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        except OSError as error:
            raise MidfillError(f"{parent} can't be written: {error.strerror}") from None
        self._lock = filelock.FileLock(self.path / _OWNER, blocking=False)
        self._lock.acquire()

    def remove(self) -> None:
        """Remove the folder and all it holds."""
        self._lock.release()
        shutil.rmtree(self.path, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError, filelock.Timeout):
            if not (folder / _OWNER).exists():
                continue  # another server is creating it
            with filelock.FileLock(folder / _OWNER, blocking=False):
                shutil.rmtree(folder, ignore_errors=True)
