"""Editing sessions over a small source."""

import shutil

import pytest

from midfill.bench.edits.editor import Round
from midfill.bench.edits.sessions import SESSION_KINDS, edit_session

SOURCE = "".join(
    f"def function_{n}(x, y):\n    total = x * {n} + y\n    return total\n\n\n" for n in range(60)
)
SOURCES = {"a.py": SOURCE, "b.py": SOURCE.replace("function", "method")}
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="replays git histories")


def session(kind: str, rounds: int = 150, seed: int = 1) -> list[Round]:
    """Return a session of one kind over ``SOURCES``."""
    return edit_session(SOURCES, SESSION_KINDS[kind], rounds=rounds, seed=seed)
