"""Target: a parser that takes bytes from outside, and what it may raise."""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from midfill.errors import MidfillError

_MAX_MESSAGE = 2000  # characters


@dataclass(frozen=True)
class Target:
    """Something that parses what others have written.

    Attributes:
        parse: given the bytes; it may raise a MidfillError of one line. Anything else is a bug.
        seeds: makes inputs to begin with; most are valid.
        max_bytes: longest input that is worth trying.
        words: bytes that are worth inserting.
    """

    parse: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]
    max_bytes: int = 4096
    words: tuple[bytes, ...] = ()

    def run(self, data: bytes) -> None:
        """Parse an input; raise whatever is a bug."""
        try:
            self.parse(data)
        except MidfillError as error:
            message = str(error)
            assert message, "an error without a message"
            assert "\n" not in message, f"an error of several lines: {message!r}"
            assert len(message) <= _MAX_MESSAGE, f"an endless error: {message[:300]!r}"


@cache
def scratch() -> Path:
    """Return a folder for files that are written again and again; in memory where that is possible.

    It is removed at the end.
    """
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def split(data: bytes, parts: int) -> list[bytes]:
    """Cut an input at its first lines of ``===``; parts that are missing are empty."""
    found = data.split(b"\n===\n", parts - 1)
    return found + [b""] * (parts - len(found))
