"""Token healing: going on from the middle of a word as if the word had been tokenised whole.

A caret inside a word cuts the text in the middle of what would be one token: after ``pri`` a model
rarely goes on with ``nt``, since it never saw these tokens side by side. Healing takes the last
tokens of the prompt back and lets the model write them again: the answer has to begin with exactly
their bytes and is free after that, so ``pri`` becomes ``print``. The bytes the client has already
are then left out of the answer. (Known from Microsoft's guidance library, 2023.)
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_TOKENS = 4
_MOST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Healing:
    """What was taken back from a prompt.

    Attributes:
        removed: how many of the prompt's last tokens.
        required: the bytes they stood for; the answer has to begin with them.
    """

    removed: int
    required: bytes


class TokenTrie:
    """Which tokens continue which bytes. The vocabulary's trie, kept as its sorted leaves.

    Tokens that begin with some bytes stand next to each other in sorted order, so a subtree is a
    slice, and looking one up takes two binary searches.

    Args:
        token_bytes: what each token stands for, by id; b"" for tokens that stand for no text
            (they are never allowed).
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._ids = sorted(
            (token_id for token_id, value in enumerate(token_bytes) if value),
            key=token_bytes.__getitem__,
        )
        self._bytes = [token_bytes[token_id] for token_id in self._ids]

    def beginning_with(self, start: bytes) -> list[int]:
        """Ids of all tokens whose bytes begin with ``start``."""
        low, high = self._range(start)
        return self._ids[low:high]

    def spelling(self, text: bytes) -> list[int]:
        """Ids of all tokens whose bytes are exactly ``text``."""
        low, high = bisect_left(self._bytes, text), bisect_left(self._bytes, text + b"\0")
        return self._ids[low:high]

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for."""
        return self._token_bytes[token_id]

    def back_off(self, token_ids: Sequence[int], fixed: int = 0) -> Healing:
        """The tokens at a prompt's end that a longer token might have swallowed.

        As many of the last tokens as together are the beginning of one longer token, at most
        four; none if the text before the caret can only end where it does.

        Args:
            token_ids: the prompt, or the last segment's tokens.
            fixed: how many of its first tokens must stay (sentinels, earlier segments).
        """
        best = Healing(0, b"")
        text = b""
        last = range(len(token_ids) - 1, max(fixed, len(token_ids) - _MOST_TOKENS) - 1, -1)
        for removed, place in enumerate(last, 1):
            piece = self._token_bytes[token_ids[place]]
            text = piece + text
            if not piece or len(text) > _MOST_BYTES:
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
    """Which tokens an answer may go on with until it has written the required bytes.

    Exact: a token is allowed if and only if some sequence of tokens begins with it and spells
    text that begins with the bytes still required.

    Args:
        trie: of the vocabulary.
        required: what the answer has to begin with.
        forbidden: ids of tokens that may not help to write it (those that would end the answer).
    """

    def __init__(
        self, trie: TokenTrie, required: bytes, forbidden: frozenset[int] = frozenset()
    ) -> None:
        self._trie = trie
        self._required = required
        self._forbidden = forbidden
        self._written = 0
        length = len(required)
        # From which positions of the required bytes the rest can be written at all.
        self._open = [False] * length + [True]
        for start in range(length - 1, -1, -1):
            self._open[start] = bool(self._usable(trie.beginning_with(required[start:]))) or any(
                self._open[end] and self._usable(trie.spelling(required[start:end]))
                for end in range(start + 1, length)
            )

    @property
    def satisfied(self) -> bool:
        """Whether the answer is free from here on."""
        return self._written >= len(self._required)

    @property
    def possible(self) -> bool:
        """Whether the vocabulary can write the bytes that are still required."""
        return self._open[min(self._written, len(self._required))]

    def allowed(self) -> list[int] | None:
        """Ids allowed next, in no particular order; None if all are."""
        return None if self.satisfied else self._allowed_at(self._written)

    def _allowed_at(self, start: int) -> list[int]:
        length = len(self._required)
        ids = self._trie.beginning_with(self._required[start:])
        for end in range(start + 1, length):
            if self._open[end]:
                ids += self._trie.spelling(self._required[start:end])
        return self._usable(ids)

    def spelling(self) -> list[tuple[int, bool]]:
        """The likely way to write what is still required: the longest token at each place.

        Returns:
            (token id, whether no other is allowed there) as far as they write nothing else; a
            token that goes on behind the required bytes only where no other is allowed.
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

    def advance(self, written: bytes) -> None:
        """Take note of the bytes of the token that was chosen.

        Raises:
            ValueError: it was not allowed.
        """
        rest = self._required[self._written :]
        if rest and not (written and (written.startswith(rest) or rest.startswith(written))):
            raise ValueError(f"{written!r} does not go on with {rest!r}")
        self._written += len(written)

    def _usable(self, ids: list[int]) -> list[int]:
        if not self._forbidden:
            return ids
        return [token_id for token_id in ids if token_id not in self._forbidden]
