"""Real source files to measure with, found where they are installed, and prompts made of them."""

import importlib.metadata
import importlib.util
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from midfill.errors import MidfillError
from midfill.models.tokens.tokenizer import Tokenizer

LIBRARIES = ("numba", "numpy", "torch")
"""Libraries that no shipped adapter was trained on; midfill always needs all but the last."""


def standard_library_documents(
    count: int, *, seed: int = 0, shortest: int = 6000, longest: int = 9000
) -> list[str]:
    """Return ``count`` files of Python's standard library, a seeded choice.

    Args:
        shortest, longest: characters of a file.

    Raises:
        ValueError: there are not that many such files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    texts = _library_texts(root, shortest, longest)
    if len(texts) < count:
        raise ValueError(f"only {len(texts)} of {count} wanted files are in {root}")
    return random.Random(seed).sample(texts, count)


@lru_cache(maxsize=2)  # a load's texts are drawn several times from the same files
def _library_texts(root: Path, shortest: int, longest: int) -> tuple[str, ...]:
    paths = (path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts)
    return tuple(_read(paths, shortest, longest))


def document_pieces(characters: int, *, seed: int = 0, files: int = 300) -> list[str]:
    """Return pieces of files of Python's standard library, in a random order.

    Args:
        characters: of each piece; shorter files are one piece each.
        seed: chooses the files and the order.
        files: that the pieces are cut from.

    Raises:
        ValueError: there are not that many files.
    """
    texts = standard_library_documents(files, seed=seed, shortest=3000, longest=30_000)
    pieces = [
        text[start : start + characters]
        for text in texts
        for start in range(0, max(len(text) - characters, 0) + 1, characters)
    ]
    random.Random(seed).shuffle(pieces)
    return pieces


class UnseenDocuments(NamedTuple):
    """Files of libraries that no shipped adapter was trained on.

    Attributes:
        texts: of the files.
        source: where they come from, such as "numpy 2.4.0 and torch 2.13.0".
    """

    texts: list[str]
    source: str


def unseen_documents(
    count: int, *, seed: int = 0, shortest: int = 6000, longest: int = 9000
) -> UnseenDocuments:
    """Return ``count`` files of those of ``LIBRARIES`` that are installed, a seeded choice.

    Args:
        shortest, longest: characters of a file.

    Raises:
        MidfillError: the libraries hold fewer such files.
    """
    versions, paths = [], []
    for name in LIBRARIES:
        if importlib.util.find_spec(name) is None:
            continue
        distribution = importlib.metadata.distribution(name)
        versions.append(f"{name} {distribution.version}")
        files = (file for file in distribution.files or () if file.suffix == ".py")
        paths += [Path(str(file.locate())) for file in files]
    texts = list(_read(sorted(paths), shortest, longest))
    if len(texts) < count:
        raise MidfillError(
            f"only {len(texts)} of {count} wanted files are in {', '.join(versions)}"
        )
    *before, last = versions
    chosen = random.Random(seed).sample(texts, count)
    return UnseenDocuments(chosen, f"{', '.join(before)} and {last}")


def _read(paths: Iterable[Path], shortest: int, longest: int) -> Iterator[str]:
    """Yield the texts of the files that hold so many characters of UTF-8."""
    for path in paths:
        if not path.is_file() or not shortest <= path.stat().st_size <= 2 * longest:
            continue
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        if shortest <= len(text) <= longest:
            # As files opened in text mode are read.
            yield text.replace("\r\n", "\n").replace("\r", "\n")


_CORPUS_FILES = 40


class Prompts:
    """Prompts as token ids or text; the same tokenizer and seed give the same prompts."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        special = set(self._tokenizer.special_tokens.values())
        self._files = standard_library_documents(
            _CORPUS_FILES, seed=seed + 1, shortest=8000, longest=30_000
        )
        self._ids: list[int] = []
        self._plain = [i for i in range(self._tokenizer.vocab_size) if i not in special]

    def random_tokens(self, count: int) -> list[int]:
        """Draw ordinary tokens, new ones on every call, so that no cache holds them."""
        return self._random.choices(self._plain, k=count)

    def code_tokens(self, stream: int, count: int, room: int) -> list[int]:
        """Return the first tokens of a stretch of real code.

        Args:
            stream: which stretch; no two share text while the corpus is large enough.
            count: how many tokens; a smaller count gives the beginning of a larger one.
            room: the largest count that will be requested.
        """
        ids = self._corpus((stream + 1) * room)
        start = stream * room % (len(ids) - room)
        return ids[start : start + count]

    def document(self, tokens: int, typed: int) -> tuple[str, str, str]:
        """Return prefix, text to type and suffix of a document with the caret in its middle.

        Args:
            tokens: of the document.
            typed: characters to type.
        """
        ids = self._corpus(2 * tokens + typed)
        prefix = self._tokenizer.decode(ids[: tokens // 2])
        rest = self._tokenizer.decode(ids[tokens // 2 : tokens + typed])
        after = self._tokenizer.encode(rest[typed:])
        return prefix, rest[:typed], self._tokenizer.decode(after[: tokens - tokens // 2])

    def count(self, prompt: str) -> int:
        """Return the number of tokens of a raw prompt, special tokens parsed."""
        return len(self._tokenizer.encode(prompt, parse_special=True))

    def longest(self, texts: Sequence[str]) -> int:
        """Return the number of tokens of the longest text."""
        return max(len(self._tokenizer.encode(text)) for text in texts)

    def _corpus(self, tokens: int) -> list[int]:
        """Return at least so many tokens of standard library files, or all that there are."""
        while self._files and len(self._ids) <= tokens:
            self._ids += self._tokenizer.encode(self._files.pop())
        return self._ids
