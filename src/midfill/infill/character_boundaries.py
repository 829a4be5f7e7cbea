"""Places where a text may be divided: never inside what a reader sees as one character."""

import unicodedata

_MAX_STEPS = 256  # characters; a longer run of combining marks is no character
_JOINER = "\u200d"  # zero width joiner, as between the people of a family emoji


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
