"""Prompts to measure with: random tokens and real code, made with a model's tokenizer."""

import random
from collections.abc import Sequence

from midfill.lab.bench.documents import standard_library_documents
from midfill.models.tokens.tokenizer import Tokenizer

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
