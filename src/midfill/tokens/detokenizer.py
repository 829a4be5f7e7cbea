"""Detokenizer: token ids to text as they come, never half a character."""

import codecs
from collections.abc import Iterable

from midfill.tokens.tokenizer import Tokenizer


class Detokenizer:
    """Turns one answer's tokens into text, piece by piece.

    A token may end inside a UTF-8 character; its bytes are held back until the rest comes. All
    pieces together are exactly what ``Tokenizer.decode`` makes of all the tokens: bytes that are
    not UTF-8 become U+FFFD at the same places.

    Args:
        tokenizer: the model's.
        skip: bytes to leave out at the start, which stand in the prompt already.

    Attributes:
        skip: how many of them are still to come.
    """

    def __init__(self, tokenizer: Tokenizer, skip: int = 0) -> None:
        self.skip = skip
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is complete with these tokens; may be empty."""
        written = b"".join(map(self._tokenizer.token_bytes, token_ids))
        shown = written[self.skip :]
        self.skip -= len(written) - len(shown)
        return self._decoder.decode(shown)

    def flush(self) -> str:
        """The rest at the answer's end: U+FFFD for a character that never got complete."""
        return self._decoder.decode(b"", final=True)
