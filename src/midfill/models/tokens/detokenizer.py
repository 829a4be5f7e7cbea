"""Detokenizer: token ids to text as they arrive, never part of a character."""

import codecs
from collections.abc import Iterable

from midfill.models.tokens.tokenizer import Tokenizer


class Detokenizer:
    """Turns one answer's tokens into text incrementally.

    A token may end inside a UTF-8 character; its bytes are held back until the rest arrives. All
    texts together are exactly ``Tokenizer.decode`` of all tokens: bytes that are not UTF-8 become
    U+FFFD at the same places.

    Args:
        tokenizer: the model's tokenizer.
        skip: bytes to leave out at the start because the prompt already contains them.

    Attributes:
        skip: bytes that are still to be left out.
    """

    def __init__(self, tokenizer: Tokenizer, skip: int = 0) -> None:
        self.skip = skip
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens, and return the text that they complete; it may be empty."""
        return self.push_bytes(b"".join(map(self._tokenizer.token_bytes, token_ids)))

    def push_bytes(self, written: bytes) -> str:
        """Add what tokens stand for, and return the text that it completes."""
        shown = written[self.skip :]
        self.skip -= len(written) - len(shown)
        return self._decoder.decode(shown)

    def flush(self) -> str:
        """Return the rest at the answer's end: U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", final=True)
