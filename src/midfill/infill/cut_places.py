"""Where a text may be cut: never inside a word, a character, or one of the model's tokens.

The two parts of a cut text are tokenised apart, and a model has learned what follows whole tokens.
Vocabularies join letters to words, a line break to the indentation after it (GPT-2's and its
children), or a bracket to the line break after it (those of GPT-4's kind). Which of these, only the
tokenizer knows. It is asked about the stretch of text around a place, through a ``KeepsTokens``
that the caller makes.

A stretch ends where every tokenizer ends a token, whatever comes before and after: between a letter
or digit and an ASCII space or sign. Its tokens are therefore those of the whole text. For the same
reason the text that follows the caret doesn't matter: between a cut and the caret is such a place.
"""

import unicodedata
from collections.abc import Callable, Iterator
from itertools import islice

KeepsTokens = Callable[[str, str], bool]
"""Takes two adjacent texts: do they, tokenised apart, give the tokens that they give together?"""

_NEAR = 256  # characters before the wanted place; a line break further back is no better than any
_FAR = 4096  # characters before it that are searched for a place inside a line
_MAX_LINES = 16  # lines that are tried before the search is given up
_MAX_TRIES = 64  # places inside a line that are tried
_CONTEXT = 16  # characters on either side of a place that a stretch holds at least
_MAX_STRETCH = 512  # characters on either side of a place that are searched for a stretch's end
_ENDS = frozenset(' \t\n\r!"#$%&()*+,-./:;<=>?@[\\]^`{|}~')  # no ', which continues "don't"
_MAX_STEPS = 256  # characters; a longer run of combining marks is no character
_JOINER = "\u200d"  # zero width joiner, as between the people of a family emoji


def keeps_any_tokens(_before: str, _after: str) -> bool:
    """Accept every place; for callers without a tokenizer."""
    return True


def place_cut(prefix: str, gap: int, keeps_tokens: KeepsTokens = keeps_any_tokens) -> int:
    """Return the cut at least ``gap`` characters before a prefix's end.

    It is between two lines if a line break is near, otherwise at a space or sign inside a line. It
    is 0 if the prefix is no longer than the gap, or if there is no such place.
    """
    limit = len(prefix) - gap
    if limit <= 0:
        return 0
    for at in _places(prefix, limit):
        if may_cut(prefix, at, keeps_tokens):
            return at
    return 0


def may_cut(prefix: str, at: int, keeps_tokens: KeepsTokens = keeps_any_tokens) -> bool:
    """Return whether the text before a caret may be cut at a place in it."""
    if at == 0:
        return True
    if at == len(prefix) or _joined(prefix, at):
        return False
    start, end = _stretch_start(prefix, at), _stretch_end(prefix, at)
    if start is None or end is None:
        return False
    return keeps_tokens(prefix[start:at], prefix[at:end])


def _places(prefix: str, limit: int) -> Iterator[int]:
    """Yield places to cut at, the best first, none after ``limit``."""
    near = max(0, limit - _NEAR)
    yield from _line_places(prefix, near, limit)
    yield from islice(_inner_places(prefix, max(0, limit - _FAR), limit), _MAX_TRIES)
    yield from islice(_line_places(prefix, 0, near), 3 * _MAX_LINES)


def _line_places(prefix: str, first: int, last: int) -> Iterator[int]:
    """Yield the places in first..last around each line break: after it, before it, before its run.

    A run is a line break with all the blanks around it.
    """
    line = prefix.rfind("\n", first, last) + 1
    while line > first:
        yield line
        before = line - 2 if prefix[line - 2 : line] == "\r\n" else line - 1
        if before >= first:
            yield before
        start = max(first, line - _MAX_STRETCH)
        run = start + len(prefix[start:line].rstrip())
        if first <= run < before:
            yield run
        line = prefix.rfind("\n", first, min(run, before)) + 1


def _inner_places(prefix: str, first: int, last: int) -> Iterator[int]:
    """Yield the places in first..last, from the last one back: at spaces, then at other signs."""
    at_signs = []
    for at in range(last, first, -1):
        before, after = prefix[at - 1], prefix[at : at + 1]
        if after.isspace() and not before.isspace():
            yield at
        elif not (before.isspace() or after.isspace() or _in_word(before, after)):
            at_signs.append(at)
    yield from at_signs


def _joined(text: str, at: int) -> bool:
    """Return whether a place is inside a word or a character."""
    before, after = text[at - 1], text[at]
    return _in_word(before, after) or divides_character(text, at)


def _in_word(before: str, after: str) -> bool:
    return (before.isalnum() or before == "_") and (after.isalnum() or after == "_")


def _stretch_start(text: str, at: int) -> int | None:
    """Return where the stretch around a place starts; None if no safe start is near."""
    for start in range(at - _CONTEXT, max(0, at - _MAX_STRETCH), -1):
        if _ends_token(text, start):
            return start
    return 0 if at <= _MAX_STRETCH else None


def _stretch_end(text: str, at: int) -> int | None:
    """Return where the stretch around a place ends; None if no safe end is near."""
    last = min(len(text) - 1, at + _MAX_STRETCH)
    for end in range(at + _CONTEXT, last + 1):
        if _ends_token(text, end):
            return end
    for end in range(min(last, at + _CONTEXT - 1), at - 1, -1):
        if _ends_token(text, end):
            return end
    return None


def _ends_token(text: str, at: int) -> bool:
    """Return whether every tokenizer ends a token at a place inside a text."""
    return text[at] in _ENDS and text[at - 1].isalnum()


def divides_character(text: str, place: int) -> bool:
    """Return whether a place is inside ``\\r\\n`` or a character of several code points.

    This is the part of Unicode's rules for grapheme clusters (UAX #29) that matters in documents:
    combining marks, joined and toned emoji, flags, and Hangul syllables in parts.
    """
    if not 0 < place < len(text):
        return False
    before, after = text[place - 1], text[place]
    if before in "\r\n":
        return before == "\r" and after == "\n"
    if after.isascii():
        return False
    if after == _JOINER or unicodedata.category(after)[0] == "M" or _extends(after):
        return True
    if before == _JOINER:
        return True
    return _is_flag_letter(after) and _flag_letters_before(text, place) % 2 == 1


def boundary_before(text: str, place: int) -> int:
    """Return the last place up to ``place`` that divides no character."""
    for back in range(min(place, _MAX_STEPS)):
        if not divides_character(text, place - back):
            return place - back
    return place if place > _MAX_STEPS else 0


def _extends(character: str) -> bool:
    return (
        "\U0001f3fb" <= character <= "\U0001f3ff"  # skin tones
        or "\U000e0020" <= character <= "\U000e007f"  # tags, as in the flag of Scotland
        or "\u1160" <= character <= "\u11ff"  # Hangul vowels and final consonants
    )


def _is_flag_letter(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"


def _flag_letters_before(text: str, place: int) -> int:
    count = 0
    while count < min(place, _MAX_STEPS) and _is_flag_letter(text[place - count - 1]):
        count += 1
    return count
