"""Prompt layouts to token ids: sentinels are ids already, each text segment is tokenised apart."""

from collections import OrderedDict

from midfill.infill.formats import Sentinel
from midfill.infill.layout import PromptLayout
from midfill.tokens.tokenizer import Tokenizer

_MARKER = "\x00"  # part of no word, so what follows it is tokenised as if it stood alone


def encode_layout(layout: PromptLayout, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a planned prompt, BOS first where the tokenizer adds one.

    User text is never parsed for special tokens; raw prompts are (as in vLLM). The ids of the
    segments decode to exactly the segments' text: no space is put before them.

    Returns:
        The ids; empty only when the layout has no segments and the tokenizer adds no BOS.
    """
    return LayoutEncoder(tokenizer, capacity=0).encode(layout)


class LayoutEncoder:
    """``encode_layout`` with a memory: segments that did not change are tokenised once.

    Args:
        tokenizer: the model's.
        capacity: characters of segment text to remember ids for, least recently used go first.
    """

    def __init__(self, tokenizer: Tokenizer, *, capacity: int = 32_000_000) -> None:
        self._tokenizer = tokenizer
        self._capacity = capacity
        self._held = 0
        self._ids: OrderedDict[str, list[int]] = OrderedDict()
        self._adds_space = _adds_leading_space(tokenizer)

    def encode(self, layout: PromptLayout) -> list[int]:
        """See ``encode_layout``."""
        tokenizer = self._tokenizer
        ids: list[int] = []
        for segment in layout.segments:
            if isinstance(segment, Sentinel):
                ids.append(segment.token_id)
            elif segment.role == "raw":
                ids += tokenizer.encode(segment.text, parse_special=True)
            else:
                ids += self._text_ids(segment.text)
        bos = tokenizer.bos_token_id
        # A raw prompt may spell its own BOS; two of them are never wanted.
        if tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def _text_ids(self, text: str) -> list[int]:
        found = self._ids.get(text)
        if found is not None:
            self._ids.move_to_end(text)
            return found
        ids = self._encode_exactly(text)
        if len(text) <= self._capacity:
            self._ids[text] = ids
            self._held += len(text)
            while self._held > self._capacity:
                old, _ = self._ids.popitem(last=False)
                self._held -= len(old)
        return ids

    def _encode_exactly(self, text: str) -> list[int]:
        """Ids of the text without the space SentencePiece puts before a text's first word."""
        if not self._adds_space:
            return self._tokenizer.encode(text)
        marked = self._tokenizer.encode(_MARKER + text)
        lead = self._tokenizer.encode(_MARKER)
        if marked[: len(lead)] == lead:
            return marked[len(lead) :]
        return self._tokenizer.encode(text)


def _adds_leading_space(tokenizer: Tokenizer) -> bool:
    ids = tokenizer.encode("a")
    return b"".join(map(tokenizer.token_bytes, ids)) != b"a"
