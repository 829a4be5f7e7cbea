"""Editing sessions over a small source."""

import shutil
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st

from midfill_lab.bench.editing import SESSION_KINDS, Round, edit_session

SOURCE = "".join(
    f"def function_{n}(x, y):\n    total = x * {n} + y\n    return total\n\n\n" for n in range(60)
)
SOURCES = {"a.py": SOURCE, "b.py": SOURCE.replace("function", "method")}
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="replays git histories")


def session(kind: str, rounds: int = 150, seed: int = 1) -> list[Round]:
    """Return a session of one kind over ``SOURCES``."""
    return edit_session(SOURCES, SESSION_KINDS[kind], rounds=rounds, seed=seed)


EDITS = st.lists(
    st.tuples(
        st.sampled_from(["type", "erase", "jump", "below", "above", "undo", "switch"]),
        st.integers(0, 2**16),
        st.text("ab(é🙂\n\r\t<>", max_size=8),
    ),
    max_size=30,
)
"""Edits for ``edited_texts``: kind, a number that says where, and what is typed."""


def edited_texts(start: str, edits: list[tuple[str, int, str]]) -> Iterator[tuple[str, str]]:
    """Yield prefix and suffix after each edit of two files; one starts with a text, one empty."""
    texts = {"a": start, "b": ""}
    carets = {"a": len(start) // 2, "b": 0}
    undo: list[tuple[str, int]] = []
    name = "a"
    for kind, number, new in edits:
        text, caret = texts[name], carets[name]
        if kind == "type":
            texts[name], carets[name] = text[:caret] + new + text[caret:], caret + len(new)
        elif kind == "erase":
            begin = max(0, caret - number % 60)
            texts[name], carets[name] = text[:begin] + text[caret:], begin
        elif kind == "jump":
            carets[name] = number % (len(text) + 1)
        elif kind == "below":
            place = caret + number % (len(text) - caret + 1)
            texts[name] = text[:place] + new + text[place + 1 :]
        elif kind == "above":
            place = number % (caret + 1)
            texts[name], carets[name] = text[:place] + new + text[place:], caret + len(new)
        elif kind == "switch":
            name = "b" if name == "a" else "a"
        elif undo:
            texts[name], carets[name] = undo.pop()
        undo.append((texts[name], carets[name]))
        yield texts[name][: carets[name]], texts[name][carets[name] :]
