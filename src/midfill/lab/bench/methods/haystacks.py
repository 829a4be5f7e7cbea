"""Real text to hide things in: source files of installed libraries that no adapter has seen."""

import random
from collections.abc import Callable, Sequence

from midfill.lab.bench.documents import unseen_documents

_DOCUMENTS = 40
_SHORTEST, _LONGEST = 9000, 20_000
"""Characters of a file: long enough that few are needed for a context."""


class Haystacks:
    """Contexts of real source lines, made with a model's tokenizer.

    Attributes:
        source: where the files come from.
        texts: of the files.
    """

    def __init__(self, encode: Callable[[str], list[int]], seed: int) -> None:
        """Read the files.

        Args:
            encode: returns the tokens of a text that begins a prompt.
            seed: chooses them.

        Raises:
            MidfillError: too few are installed.
        """
        documents = unseen_documents(_DOCUMENTS, seed=seed, shortest=_SHORTEST, longest=_LONGEST)
        self.source = documents.source
        self.texts = documents.texts
        self._encode = encode

    def document(self, number: int) -> list[int]:
        """Return the tokens of one file."""
        return self._encode(self.texts[number % len(self.texts)])

    def text(self, number: int) -> str:
        """Return one file."""
        return self.texts[number % len(self.texts)]

    def lines(self, number: int, tokens: int) -> list[str]:
        """Return whole lines of so many tokens or a few fewer, from files in order.

        Args:
            number: of the first file.
            tokens: of all lines together.
        """
        lines: list[str] = []
        while len(self._encode("".join(lines))) < tokens:
            lines += self.text(number).rstrip("\n").splitlines(keepends=True)
            lines[-1] += "\n"
            number += 1
        few, many = 0, len(lines)
        while many - few > 1:  # lines[:few] fit
            middle = (few + many) // 2
            if len(self._encode("".join(lines[:middle]))) <= tokens:
                few = middle
            else:
                many = middle
        return lines[:few]

    def hide(self, number: int, tokens: int, hidden: Sequence[tuple[float, str]]) -> list[int]:
        """Return a context of real lines with some others between them.

        Args:
            number: of the first file.
            tokens: of the whole context, which has a few fewer.
            hidden: (depth from 0 to 1, line) of each.
        """
        taken = sum(len(self._encode(line)) for _, line in hidden)
        lines = self.lines(number, tokens - taken)
        for depth, line in sorted(hidden, reverse=True):
            lines.insert(round(depth * len(lines)), line)
        return self._encode("".join(lines))


WORDS = (
    ("amber", "brisk", "calm", "dusty", "early", "faint", "grand", "hollow", "ivory", "jolly"),
    ("anchor", "beacon", "candle", "dragon", "engine", "falcon", "garden", "harbor", "island"),
)


def names(count: int, rng: random.Random) -> list[str]:
    """Return different names of two words, such as "amber falcon"."""
    every = [f"{first} {second}" for first in WORDS[0] for second in WORDS[1]]
    return rng.sample(every, count)
