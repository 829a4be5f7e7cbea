"""Templates: raw prompts in which a client has filled in the model's FIM format itself."""

from dataclasses import dataclass

from midfill.infill.formats import FimFormat, Sentinel


@dataclass(frozen=True, slots=True)
class FilledTemplate:
    """The parts of a raw prompt.

    Attributes:
        lead: text before the first sentinel (BOS, repository context), verbatim.
        prefix: all text before the caret: what followed PRE, then what followed MID.
        suffix: text after the caret.
    """

    lead: str
    prefix: str
    suffix: str


def parse_template(format: FimFormat, prompt: str) -> FilledTemplate | None:
    """Return the parts of a raw prompt, or None if it is not this format's template.

    Every sentinel must occur once and in the family's order, and no other special token of the
    format may occur in the texts. In a raw prompt all of them are parsed as tokens, so any other
    reading would change what the model sees.
    """
    first, second = format.prefix.text, format.suffix.text
    if format.order == "spm":
        first, second = second, first
    lead, found, rest = prompt.partition(first)
    a, found_second, rest = rest.partition(second)
    if not found or not found_second:
        return None
    b, typed = rest, ""
    if format.middle is not None:
        b, found, typed = rest.partition(format.middle.text)
        if not found:
            return None
    prefix, suffix = (a, b) if format.order == "psm" else (b, a)
    if format.order == "spm" and typed:
        return None  # suffix-first families never continue a text after MID
    if any(token.text in text for token in _tokens(format) for text in (prefix, suffix, typed)):
        return None
    if any(token.text in lead for token in (format.prefix, format.suffix)):
        return None
    return FilledTemplate(lead, prefix + typed, suffix)


def _tokens(format: FimFormat) -> list[Sentinel]:
    others = [format.middle, format.repository, format.file_separator]
    named = [format.prefix, format.suffix, *(token for token in others if token), *format.stop]
    return list(dict.fromkeys(named))
