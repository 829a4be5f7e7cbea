"""Prompt layouts to token ids: sentinels are ids already, each text segment is tokenised alone."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from sys import getsizeof

from midfill.config import DEFAULT_DOCUMENT_MEMORY
from midfill.infill.formats import Sentinel
from midfill.infill.layout import PromptLayout, Segment
from midfill.models.tokens.tokenizer import Tokenizer

_ENTRY_BYTES = 240  # of the mapping, for each segment; a test measures that it suffices


def encode_layout(layout: PromptLayout, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a planned prompt, BOS first where the tokenizer adds one.

    User text is never parsed for special tokens; raw prompts are, as in vLLM. The ids of each
    segment stand for exactly its text: the space that SentencePiece puts before a text is left
    out. Only a prompt without sentinels is tokenised as a text of its own.

    Returns:
        The ids; empty only when the layout has no segments and the tokenizer adds no BOS.
    """
    return LayoutEncoder(tokenizer, max_bytes=0).encode(layout)


class LayoutEncoder:
    """``encode_layout`` with a cache: segments that did not change are tokenised once.

    Args:
        tokenizer: the model's tokenizer.
        max_bytes: memory for segments and their ids; the least recently used are dropped first.
        raw_bos: the token that goes before raw prompts that no control token begins; None for the
            tokenizer's BOS, where it adds one.

    Attributes:
        max_bytes: see above.
        held_bytes: memory that the cached segments take now, objects included.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_bytes: int = DEFAULT_DOCUMENT_MEMORY // 4,
        raw_bos: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._raw_bos = raw_bos
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._ids: OrderedDict[str, Sequence[int]] = OrderedDict()

    def encode(self, layout: PromptLayout) -> list[int]:
        """Return the token ids of a layout; see ``encode_layout``."""
        return [token_id for part in self.encode_parts(layout) for token_id in part]

    def encode_parts(self, layout: PromptLayout) -> list[Sequence[int]]:
        """Return the same ids in parts: BOS (empty where none is added), then each segment."""
        parts = [self._segment_ids(segment, layout) for segment in layout.segments]
        first = next((part[0] for part in parts if part), None)
        bos = self._bos(layout, first)
        return [[] if bos is None else [bos], *parts]

    def _bos(self, layout: PromptLayout, first: int | None) -> int | None:
        """Return the BOS that goes before a prompt, if any, given the prompt's first token."""
        bos = self._tokenizer.bos_token_id if self._tokenizer.add_bos else None
        if layout.layout == "verbatim" and self._raw_bos is not None:
            begun = first is not None and not self._tokenizer.token_bytes(first)
            return None if begun else self._raw_bos
        return bos if bos != first else None  # text may spell its own BOS

    def count(self, text: str) -> int:
        """Return how many tokens a text has as a segment of its own."""
        return len(self._text_ids(text))

    def _segment_ids(self, segment: Segment, layout: PromptLayout) -> Sequence[int]:
        if isinstance(segment, Sentinel):
            return [segment.token_id]
        if segment.role == "raw":
            return self._tokenizer.encode(segment.text, parse_special=True)
        if layout.layout == "prefix-only":
            return self._tokenizer.encode(segment.text)
        return self._text_ids(segment.text)

    def _text_ids(self, text: str) -> Sequence[int]:
        found = self._ids.get(text)
        if found is not None:
            self._ids.move_to_end(text)
            return found
        ids = array("I", self._tokenizer.encode_continuation(text))
        size = _entry_bytes(text, ids)
        if size <= self.max_bytes:
            self._ids[text] = ids
            self.held_bytes += size
            while self.held_bytes > self.max_bytes:
                self.held_bytes -= _entry_bytes(*self._ids.popitem(last=False))
        return ids


def _entry_bytes(text: str, ids: Sequence[int]) -> int:
    return getsizeof(text) + getsizeof(ids) + _ENTRY_BYTES
