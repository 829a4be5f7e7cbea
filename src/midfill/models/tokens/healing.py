"""Token healing: continue an unfinished word as if it had been tokenised whole.

A caret inside a word splits the text in the middle of what would be one token. After ``pri`` a
model rarely continues with ``nt``, since it never saw these tokens side by side. Healing removes
the last tokens of the prompt and lets the model write them again. The answer must begin with
exactly their bytes and is free after that, so ``pri`` becomes ``print``. The bytes that the client
already has are then left out of the answer. (Known from Microsoft's guidance library, 2023.)
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

_MAX_TOKENS = 4  # removed from a prompt
_MAX_BYTES = 32  # of the removed tokens together


@dataclass(frozen=True, slots=True)
class Healing:
    """The tokens removed from a prompt's end.

    Attributes:
        removed: their number.
        required: the bytes they stand for; the answer must begin with them.
    """

    removed: int
    required: bytes


class TokenTrie:
    """The vocabulary's trie over bytes, stored as its sorted leaves.

    Tokens that begin with the same bytes are adjacent in sorted order. A subtree is therefore a
    slice, and two binary searches find it.

    Args:
        token_bytes: bytes of each token by id; b"" for tokens without text (never allowed).
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._ids = sorted(
            (token_id for token_id, value in enumerate(token_bytes) if value),
            key=token_bytes.__getitem__,
        )
        self._bytes = [token_bytes[token_id] for token_id in self._ids]

    def beginning_with(self, start: bytes) -> list[int]:
        """Return the ids of all tokens whose bytes begin with ``start``."""
        low, high = self._range(start)
        return self._ids[low:high]

    def spelling(self, text: bytes) -> list[int]:
        """Return the ids of all tokens whose bytes are exactly ``text``."""
        low, high = bisect_left(self._bytes, text), bisect_left(self._bytes, text + b"\0")
        return self._ids[low:high]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for."""
        return self._token_bytes[token_id]

    def back_off(self, token_ids: Sequence[int], fixed: int = 0) -> Healing:
        """Return the tokens at a prompt's end that could be part of one longer token.

        These are as many of the last tokens as together begin a longer token, at most four. There
        are none if no token continues the text before the caret.

        Args:
            token_ids: the prompt, or the last segment's tokens.
            fixed: number of first tokens that must stay (sentinels, earlier segments).
        """
        best = Healing(0, b"")
        text = b""
        last = range(len(token_ids) - 1, max(fixed, len(token_ids) - _MAX_TOKENS) - 1, -1)
        for removed, place in enumerate(last, 1):
            piece = self._token_bytes[token_ids[place]]
            text = piece + text
            if not piece or len(text) > _MAX_BYTES:
                break
            if len(self.beginning_with(text)) > len(self.spelling(text)):
                best = Healing(removed, text)
        return best

    def _range(self, start: bytes) -> tuple[int, int]:
        low = bisect_left(self._bytes, start)
        after = start.rstrip(b"\xff")  # the least bytes greater than all that begin with start
        if not after:
            return low, len(self._bytes)
        return low, bisect_left(self._bytes, after[:-1] + bytes([after[-1] + 1]))


class HealingConstraint:
    """The tokens an answer may continue with until it has written the required bytes.

    Exact: a token is allowed if and only if some sequence of tokens begins with it and spells
    text that begins with the bytes still required.

    Args:
        trie: the vocabulary's trie.
        required: bytes that the answer must begin with.
        forbidden: ids of tokens that may not be used for it (those that would end the answer).
    """

    def __init__(
        self, trie: TokenTrie, required: bytes, forbidden: frozenset[int] = frozenset()
    ) -> None:
        self._trie = trie
        self._required = required
        self._forbidden = forbidden
        self._written = 0
        length = len(required)
        # Whether the rest of the required bytes can be written from each position.
        self._open = [False] * length + [True]
        for start in range(length - 1, -1, -1):
            self._open[start] = bool(self._usable(trie.beginning_with(required[start:]))) or any(
                self._open[end] and self._usable(trie.spelling(required[start:end]))
                for end in range(start + 1, length)
            )

    @property
    def satisfied(self) -> bool:
        """Whether the answer is unconstrained from here on."""
        return self._written >= len(self._required)

    @property
    def possible(self) -> bool:
        """Whether the vocabulary can spell the bytes that are still required."""
        return self._open[min(self._written, len(self._required))]

    def allowed(self) -> list[int] | None:
        """Return the ids allowed next, in no particular order; None if all are."""
        return None if self.satisfied else self._allowed_at(self._written)

    def _allowed_at(self, start: int) -> list[int]:
        length = len(self._required)
        ids = self._trie.beginning_with(self._required[start:])
        for end in range(start + 1, length):
            if self._open[end]:
                ids += self._trie.spelling(self._required[start:end])
        return self._usable(ids)

    def exact(self) -> list[int]:
        """Return those of the allowed ids that write nothing beyond the required bytes."""
        start, length = self._written, len(self._required)
        ids = list[int]()
        for end in range(start + 1, length + 1):
            if self._open[end]:
                ids += self._trie.spelling(self._required[start:end])
        return self._usable(ids)

    @property
    def exceeded(self) -> bool:
        """Whether the answer has bytes beyond the required ones."""
        return self._written > len(self._required)

    def spelling(self) -> list[tuple[int, bool]]:
        """Return the likely tokens for what is still required: the longest one at each place.

        Returns:
            (token id, whether no other is allowed there), as long as they write nothing else. A
            token that extends beyond the required bytes is included only if no other is allowed.
        """
        tokens = list[tuple[int, bool]]()
        start, length = self._written, len(self._required)
        while start < length:
            allowed = self._allowed_at(start)
            if len(allowed) == 1:
                tokens.append((allowed[0], True))
                start += len(self._trie.token_bytes(allowed[0]))
                continue
            for end in range(length, start, -1):
                exact = self._usable(self._trie.spelling(self._required[start:end]))
                if exact and self._open[end]:
                    tokens.append((exact[0], False))
                    start = end
                    break
            else:
                break
        return tokens

    def advance_by(self, token_id: int) -> None:
        """Record a token that was chosen; see ``advance``."""
        self.advance(self._trie.token_bytes(token_id))

    def advance(self, written: bytes) -> None:
        """Record the bytes of the token that was chosen.

        Raises:
            ValueError: the token was not allowed.
        """
        rest = self._required[self._written :]
        if rest and not (written and (written.startswith(rest) or rest.startswith(written))):
            raise ValueError(f"{written!r} does not continue {rest!r}")
        self._written += len(written)

    def _usable(self, ids: list[int]) -> list[int]:
        if not self._forbidden:
            return ids
        return [token_id for token_id in ids if token_id not in self._forbidden]
