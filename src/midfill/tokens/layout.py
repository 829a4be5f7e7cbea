"""Prompt layouts to token ids: sentinels are ids already, each text segment is tokenised apart."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from midfill.infill.formats import Sentinel
from midfill.infill.layout import PromptLayout, Segment
from midfill.tokens.tokenizer import Tokenizer


def encode_layout(layout: PromptLayout, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a planned prompt, BOS first where the tokenizer adds one.

    User text is never parsed for special tokens; raw prompts are (as in vLLM). The ids of each
    segment stand for exactly its text: no space is put before it, as SentencePiece does at the
    start of a text. Only a prompt without sentinels is tokenised as a text of its own.

    Returns:
        The ids; empty only when the layout has no segments and the tokenizer adds no BOS.
    """
    return LayoutEncoder(tokenizer, capacity=0).encode(layout)


class LayoutEncoder:
    """``encode_layout`` with a memory: segments that did not change are tokenised once.

    Args:
        tokenizer: the model's.
        capacity: characters of segment text to remember ids for, least recently used go first.

    Attributes:
        held: characters remembered now.
    """

    def __init__(self, tokenizer: Tokenizer, *, capacity: int = 16_000_000) -> None:
        self._tokenizer = tokenizer
        self._capacity = capacity
        self.held = 0
        self._ids: OrderedDict[str, Sequence[int]] = OrderedDict()

    def encode(self, layout: PromptLayout) -> list[int]:
        """See ``encode_layout``."""
        return [token_id for part in self.encode_parts(layout) for token_id in part]

    def encode_parts(self, layout: PromptLayout) -> list[Sequence[int]]:
        """The same ids in parts: of BOS, empty where none is added, and of each segment."""
        parts = [self._segment_ids(segment, layout) for segment in layout.segments]
        bos = self._tokenizer.bos_token_id
        # A raw prompt may spell its own BOS; two of them are never wanted.
        first = next((part[0] for part in parts if part), None)
        added = [bos] if self._tokenizer.add_bos and bos is not None and first != bos else []
        return [added, *parts]

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
        if len(text) <= self._capacity:
            self._ids[text] = ids
            self.held += len(text)
            while self.held > self._capacity:
                old, _ = self._ids.popitem(last=False)
                self.held -= len(old)
        return ids
