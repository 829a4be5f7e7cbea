"""PromptLayout: a prompt as an ordered list of segments, text apart from sentinel tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from midfill.infill.formats import FimFormat, Sentinel

Role = Literal["context", "prefix", "suffix", "increment", "raw"]
LayoutName = Literal["psm", "spm", "efim", "verbatim", "prefix-only"]


@dataclass(frozen=True, slots=True)
class TextSegment:
    """User text, tokenised by itself.

    Attributes:
        text: never empty.
        role: what it is; special tokens are parsed in "raw" text and in no other.
    """

    text: str
    role: Role


Segment = TextSegment | Sentinel


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLayout:
    """One planned prompt.

    Attributes:
        segments: in the order the model reads them.
        layout: what was built, which can differ from what was asked for: suffix-first families
            know only "spm", a model without sentinels gets "prefix-only" (the suffix is not
            seen at all: tell the client).
        cut: characters of the planned prefix that stand before the suffix; the rest is the
            increment.
        document: id of the document it was planned for; None where none is kept.
        stop_token_ids: tokens that end the answer, beside the model's own end tokens.
    """

    segments: tuple[Segment, ...]
    layout: LayoutName
    cut: int = 0
    document: str | None = None
    stop_token_ids: tuple[int, ...] = ()

    def text_of(self, *roles: Role) -> str:
        """The text of all segments with one of these roles, joined."""
        return "".join(
            segment.text
            for segment in self.segments
            if isinstance(segment, TextSegment) and segment.role in roles
        )

    @property
    def planned_prefix(self) -> str:
        """All text before the caret that the model sees, context left out."""
        return self.text_of("prefix", "increment")

    @property
    def planned_suffix(self) -> str:
        """All text after the caret that the model sees."""
        return self.text_of("suffix")


def lay_out(
    format: FimFormat,
    prefix: str,
    suffix: str,
    cut: int,
    *,
    pieces: Sequence[str] | None = None,
    context: Sequence[Segment] = (),
) -> tuple[tuple[Segment, ...], LayoutName]:
    """Segments and layout name of a prefix cut at a place, around a suffix.

    Suffix-first formats ignore the cut: they have one order, ``SUF S PRE P [MID]``. Context goes
    before everything else where the family has a token for files, else to where P begins.

    Args:
        cut: characters of the prefix before the suffix, 0 to len(prefix).
        pieces: the increment prefix[cut:] in pieces to be tokenised apart; None is one piece.
        context: see ``midfill.infill.context``.
    """
    before, inside = (context, ()) if format.file_separator is not None else ((), context)
    segments: list[Segment | None]
    if format.order == "spm":
        head = [*inside, _text(prefix, "prefix"), format.middle]
        segments = [*before, format.suffix, _text(suffix, "suffix"), format.prefix, *head]
        return _present(segments), "spm"
    if pieces is None:
        pieces = (prefix[cut:],)
    segments = [
        *before,
        format.prefix,
        *inside,
        _text(prefix[:cut], "prefix"),
        format.suffix,
        _text(suffix, "suffix"),
        format.middle,
        *(_text(piece, "increment") for piece in pieces),
    ]
    return _present(segments), "psm" if cut == len(prefix) else "spm" if cut == 0 else "efim"


def _text(text: str, role: Role) -> TextSegment | None:
    return TextSegment(text, role) if text else None


def _present(segments: list[Segment | None]) -> tuple[Segment, ...]:
    return tuple(segment for segment in segments if segment is not None)
