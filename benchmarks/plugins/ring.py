"""The ring of chunks that llama.vim and llama.vscode show the model beside the document.

A chunk is about 32 lines of what the user has seen. It is queued when it is picked, and moves into
the ring when the user pauses; the ring then holds at most 16, the oldest leaves.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_CHUNKS, _QUEUED = 16, 16
CHUNK_LINES = 64  # half of them are taken
_WORDS = re.compile(r"\W+")

Similarity = Callable[[Sequence[str], Sequence[str]], float]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some lines of a file."""

    lines: tuple[str, ...]
    filename: str


class Ring:
    """The ring of one session.

    Args:
        generator: where in a text chunks are taken.
        similarity: how similar two chunks are; from 0.9 on the older one leaves.
    """

    def __init__(self, generator: random.Random, similarity: Similarity) -> None:
        self.chunks: list[Chunk] = []
        self._queued: list[Chunk] = []
        self._random = generator
        self._similarity = similarity

    def pick(self, lines: Sequence[str], filename: str, *, evict: bool) -> None:
        """Queue a part of a text, unless there is one like it and ``evict`` is not set."""
        if len(lines) < 3:
            return
        if len(lines) + 1 >= CHUNK_LINES:
            half = CHUNK_LINES // 2
            start = self._random.randint(0, max(0, len(lines) - half))
            lines = lines[start : start + half]
        chunk = Chunk(tuple(lines), filename)
        if any(chunk.lines == one.lines for one in (*self.chunks, *self._queued)):
            return
        for held in (self._queued, self.chunks):
            similar = [one for one in held if self._similarity(one.lines, chunk.lines) > 0.9]
            if similar and not evict:
                return
            held[:] = [one for one in held if one not in similar]
        self._queued = [*self._queued, chunk][-_QUEUED:]

    def update(self) -> bool:
        """Move a queued chunk into the ring; return whether there was one."""
        if not self._queued:
            return False
        self.chunks = [*self.chunks, self._queued.pop(0)][-_CHUNKS:]
        return True

    def evict_similar(self, lines: Sequence[str]) -> None:
        """Drop chunks that are much like what is around the caret."""
        self.chunks = [one for one in self.chunks if self._similarity(one.lines, lines) <= 0.5]

    def extra(self) -> list[dict[str, object]]:
        """Return ``input_extra``."""
        return [
            {"text": "\n".join(one.lines) + "\n", "time": 0, "filename": one.filename}
            for one in self.chunks
        ]


def common_words(one: Sequence[str], other: Sequence[str]) -> float:
    """Return llama.vim's similarity: the share of words that both have."""
    first, second = _WORDS.split("\n".join(one)), _WORDS.split("\n".join(other))
    known = set(first)
    return 2 * sum(word in known for word in second) / (len(first) + len(second))


def common_lines(one: Sequence[str], other: Sequence[str]) -> float:
    """Return llama.vscode's: the share of lines that both have, each counted once."""
    first, second = Counter(set(one)), Counter(set(other))
    return (first & second).total() / ((first | second).total() or 1)
