"""Neighbours: how busy others keep the machine while something is measured, or are to keep it."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from midfill.system.python_child import python_command, python_environment

_STAT = Path("/proc/stat")
_IDLE = (3, 4)
"""Fields of a line of the processors' time: idle, and waiting for a disk."""
_GUESTS = 8
"""Fields from here on are part of earlier ones."""
_SETTLE_SECONDS = 0.3  # until a process that was just started is busy


class Neighbours:
    """Processor time that others take, from its creation on: processes, and other guests."""

    def __init__(self, stat: Path = _STAT) -> None:
        """Begin to count.

        Args:
            stat: Linux's count of the processors' time.
        """
        self._stat = stat
        self._before = self._read()

    def share(self) -> float | None:
        """Return others' share of all processor time; None where the system doesn't say."""
        now = self._read()
        if now is None or self._before is None:
            return None
        total, busy, own = (after - before for after, before in zip(now, self._before, strict=True))
        return min(max((busy - own) / total, 0.0), 1.0) if total > 0 else None

    def _read(self) -> tuple[float, float, float] | None:
        """Return seconds so far: of all processors, busy ones, and those of this process."""
        try:
            fields = self._stat.read_text().splitlines()[0].split()[1:][:_GUESTS]
            ticks = [int(field) for field in fields]
            rate = os.sysconf("SC_CLK_TCK")
        except (AttributeError, IndexError, OSError, ValueError):
            return None
        idle = sum(ticks[place] for place in _IDLE if place < len(ticks))
        own = os.times()
        return sum(ticks) / rate, (sum(ticks) - idle) / rate, own.user + own.system


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run processes that never wait for anything, as a compiler would, and end them."""
    command = python_command("-c", "while True: pass")
    environment = python_environment()
    processes = [subprocess.Popen(command, env=environment) for _ in range(count)]
    try:
        if processes:
            time.sleep(_SETTLE_SECONDS)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
