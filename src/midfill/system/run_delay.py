"""How long threads of this process have waited for a core."""

import os
from collections.abc import Iterable
from pathlib import Path

_TASKS = Path("/proc/self/task")
_DELAY = 1  # field of Linux's schedstat, in nanoseconds


class RunDelays:
    """Reads how long threads were ready to run while other threads had their cores.

    Linux counts it; elsewhere nothing is known. The files of the threads that were asked for last
    stay open.
    """

    def __init__(self, tasks: Path = _TASKS) -> None:
        """Read nothing yet.

        Args:
            tasks: folder with one folder per thread.
        """
        self._tasks = tasks
        self._files: dict[int, int] = {}

    def total(self, threads: Iterable[int]) -> float | None:
        """Return the seconds that some threads have waited so far, all together.

        Args:
            threads: the system's ids.

        Returns:
            None where the system doesn't say.
        """
        wanted = set(threads)
        if not self._files.keys() <= wanted:
            self._close()
        try:
            fields = [os.pread(self._file(thread), 100, 0).split() for thread in wanted]
            return sum(int(values[_DELAY]) for values in fields) / 1e9
        except (OSError, IndexError, ValueError):
            self._close()  # a thread that has ended may give its id to another one
            return None

    def _file(self, thread: int) -> int:
        file = self._files.get(thread)
        if file is None:
            path = self._tasks / str(thread) / "schedstat"
            file = self._files[thread] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return file

    def _close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        self._close()
