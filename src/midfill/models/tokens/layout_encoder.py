"""Prompt layouts to token ids: sentinels are ids already, each text segment is tokenised alone.

So it is known which of a prompt's tokens show other files than the document.
"""

import bisect
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from sys import getsizeof
from typing import TypeGuard

from midfill.config import DEFAULT_DOCUMENT_MEMORY
from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.layout import PromptLayout, Segment, TextSegment
from midfill.models.tokens.tokenizer import Tokenizer

_FileStarts = Callable[[str, tuple[int, ...], tuple[int, ...]], tuple[int, ...]]
"""``_find_file_starts`` for one tokenizer."""

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
        self._file_starts: _FileStarts = lru_cache(maxsize=16)(
            partial(_find_file_starts, token_bytes=tokenizer.token_bytes)
        )

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

    def file_bounds(
        self, layout: PromptLayout, parts: Sequence[Sequence[int]], format: FimFormat | None
    ) -> tuple[int, ...]:
        """Return the number of each shown file's first token, and of what follows them.

        A file ends with the separator after it. In families without separators, a token that joins
        the end of a file to the next one belongs to the next.

        Args:
            layout: of a prompt.
            parts: the ids of its parts, as of ``encode_parts``.
            format: the model's.
        """
        separator = None if format is None else format.file_separator
        segments, at = layout.segments, len(parts[0])
        bounds: list[int] = []
        for number, segment in enumerate(segments):
            start, at = at, at + len(parts[number + 1])
            if not _shows_files(segment):
                continue
            after = segments[number + 1] if number + 1 < len(segments) else None
            before = segments[number - 1] if number else None
            if separator is None:
                found = self._file_starts(segment.text, segment.files, tuple(parts[number + 1]))
                bounds += [start + place for place in found]
            elif before == separator == after:
                bounds += [start, at + len(parts[number + 2])]
        return tuple(dict.fromkeys(bounds))

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


def count_file_tokens(layout: PromptLayout, parts: Sequence[Sequence[int]]) -> int:
    """Return how many of a layout's tokens show other files.

    Args:
        layout: of a prompt.
        parts: the ids of its parts, as of ``LayoutEncoder.encode_parts``.
    """
    return sum(
        len(part)
        for segment, part in zip(layout.segments, parts[1:], strict=True)
        if _shows_files(segment)
    )


def _shows_files(segment: Segment) -> TypeGuard[TextSegment]:
    return isinstance(segment, TextSegment) and segment.role == "context"


def _find_file_starts(
    text: str,
    files: tuple[int, ...],
    ids: tuple[int, ...],
    *,
    token_bytes: Callable[[int], bytes],
) -> tuple[int, ...]:
    """Return the numbers of the tokens in which files begin, and of the first one after them.

    Args:
        text: the files, and what follows them.
        files: see ``TextSegment``.
        ids: the text's tokens.
        token_bytes: returns a token's bytes.

    Returns:
        As many as ``files``; nothing where the tokens aren't the text as it is.
    """
    ends = list(accumulate(len(token_bytes(token_id)) for token_id in ids))
    if not ends or ends[-1] != len(text.encode()):
        return ()
    places = (len(text[:place].encode()) for place in files)
    return tuple(bisect.bisect_right(ends, place) for place in places)
