"""How long-running work reports its progress to the caller."""

import re
from collections.abc import Callable
from typing import NamedTuple, Protocol

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total): bytes or steps, total 0 where it is unknown."""


class NotedProgress(Protocol):
    """A ``Progress`` that takes a note as well: how much is done, in words."""

    def __call__(self, stage: str, done: int, total: int, note: str = "", /) -> None:
        """Report progress."""


StageProgress = Callable[[int, int], None]
"""Called with (done, total) within one stage that the caller names itself."""


def ignore_progress(stage: str, done: int, total: int) -> None:
    """Do nothing: the progress of work that nobody watches."""


STAGES_VARIABLE = "MIDFILL_STAGES"
"""Environment variable of a process that another one has started.

Where it is set, lines on standard output say what the process is doing, see ``stage_lines``.
"""

_STAGE = re.compile(r"stage (-|\d+) (.+)")


class Stage(NamedTuple):
    """What long work is doing.

    Attributes:
        name: in words.
        percentage: how much of it is done; None where that is unknown.
    """

    name: str
    percentage: int | None = None

    def __str__(self) -> str:
        return self.name if self.percentage is None else f"{self.name}: {self.percentage}%"

    @classmethod
    def parse(cls, line: str) -> "Stage | None":
        """Return the stage that a line of ``stage_lines`` names; None for any other line."""
        found = _STAGE.fullmatch(line)
        return found and cls(found[2], None if found[1] == "-" else int(found[1]))


def stage_lines(write: Callable[[str], None]) -> NotedProgress:
    """Return a progress callback that writes a line for each new stage and percentage."""
    last: Stage | None = None

    def report(stage: str, done: int, total: int, note: str = "", /) -> None:
        nonlocal last
        # What has one step is begun or over, and no share of it is known.
        now = Stage(stage, min(100 * done // total, 100) if total > 1 else None)
        if now != last:
            last = now
            write(f"stage {'-' if now.percentage is None else now.percentage} {now.name}")

    return report
