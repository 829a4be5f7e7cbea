"""Where each other file that a prompt shows begins and ends among the prompt's tokens."""

import bisect
from collections.abc import Callable, Sequence
from itertools import accumulate

from midfill.infill.formats import FimFormat
from midfill.infill.layout import PromptLayout, TextSegment

FileTokens = Callable[[str, tuple[int, ...], tuple[int, ...]], tuple[int, ...]]
"""``find_file_tokens`` for one tokenizer."""


def context_bounds(
    layout: PromptLayout,
    parts: Sequence[Sequence[int]],
    format: FimFormat | None,
    file_tokens: FileTokens,
) -> tuple[int, ...]:
    """Return the number of each shown file's first token, and of what follows them.

    A file ends with the separator after it. In families without separators, a token that joins the
    end of a file to the next one belongs to the next.

    Args:
        layout: of a prompt.
        parts: the ids of BOS and of each of its segments.
        format: the model's.
        file_tokens: see ``find_file_tokens``.
    """
    separator = None if format is None else format.file_separator
    segments, at = layout.segments, len(parts[0])
    bounds: list[int] = []
    for number, segment in enumerate(segments):
        start, at = at, at + len(parts[number + 1])
        if not isinstance(segment, TextSegment) or segment.role != "context":
            continue
        after = segments[number + 1] if number + 1 < len(segments) else None
        before = segments[number - 1] if number else None
        if separator is None:
            found = file_tokens(segment.text, segment.files, tuple(parts[number + 1]))
            bounds += [start + one for one in found]
        elif before == separator == after:
            bounds += [start, at + len(parts[number + 2])]
    return tuple(dict.fromkeys(bounds))


def find_file_tokens(
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
    ends = list(accumulate(len(token_bytes(one)) for one in ids))
    if not ends or ends[-1] != len(text.encode()):
        return ()
    places = (len(text[:place].encode()) for place in files)
    return tuple(bisect.bisect_right(ends, place) for place in places)
