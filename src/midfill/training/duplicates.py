"""SeenTexts: tells whether a text, or another version of it, was seen before, by its lines."""

import hashlib

_COMMON_LINE = 12  # characters; shorter lines stand in every file


class SeenTexts:
    """A set of texts that finds again what has most lines in common with those in it.

    Args:
        share: a text with more than this share of its lines seen before counts as seen.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._digests: set[bytes] = set()
        self._lines: set[int] = set()

    def copy(self) -> "SeenTexts":
        """Another set with the same texts in it."""
        other = SeenTexts(self._share)
        other._digests, other._lines = set(self._digests), set(self._lines)
        return other

    def add(self, text: str) -> None:
        """Put a text in."""
        self._remember(_digest(text), _line_hashes(text))

    def add_new(self, text: str) -> bool:
        """Put a text in unless it was seen before; returns whether it was not."""
        digest = _digest(text)
        if digest in self._digests:
            return False
        lines = _line_hashes(text)
        seen = sum(line in self._lines for line in lines)
        if lines and seen > self._share * len(lines):
            return False
        self._remember(digest, lines)
        return True

    def _remember(self, digest: bytes, lines: list[int]) -> None:
        self._digests.add(digest)
        self._lines.update(lines)


def _line_hashes(text: str) -> list[int]:
    stripped = (line.strip() for line in text.split("\n"))
    return [_line_hash(line) for line in stripped if len(line) >= _COMMON_LINE]


def _line_hash(line: str) -> int:
    """The same in every process, unlike Python's own."""
    digest = hashlib.blake2b(line.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()
