"""How long-running work reports its progress to the caller."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total): bytes or steps, total 0 where it is unknown."""

StageProgress = Callable[[int, int], None]
"""Called with (done, total) within one stage that the caller names itself."""


def ignore_progress(stage: str, done: int, total: int) -> None:
    """Do nothing: the progress of work that nobody watches."""
