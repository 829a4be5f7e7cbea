"""PromptLayout: a prompt as an ordered list of segments, each either text or a sentinel token."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from midfill.infill.formats import FimFormat, Sentinel

Role = Literal["context", "prefix", "suffix", "increment", "raw"]
LayoutName = Literal["psm", "spm", "efim", "verbatim", "prefix-only"]


@dataclass(frozen=True, slots=True)
class TextSegment:
    """User text that is tokenised by itself.

    Attributes:
        text: the text, never empty.
        role: which part of the prompt it is; special tokens are parsed in "raw" text only.
        files: where each of several files in it begins, and where the last one ends, in characters;
            empty if it isn't made of files.
    """

    text: str
    role: Role
    files: tuple[int, ...] = field(default=(), compare=False)


Segment = TextSegment | Sentinel


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLayout:
    """One planned prompt.

    Attributes:
        segments: in the order the model reads them.
        layout: what was built, which can differ from what was asked for. Suffix-first families
            support only "spm". A model without sentinels gets "prefix-only": it does not see the
            suffix, and the client should be told.
        cut: characters of the planned prefix that stand before the suffix; the rest is the
            increment.
        document: id of the document it was planned for; None where none is remembered.
        stop_token_ids: tokens that end the answer, beside the model's own end tokens.
        template: the first sentinel of the template that the request had filled in; None if it was
            a prefix with a suffix, or a raw prompt.
        line_break: begins the suffix though the client didn't send it, and has to end every answer
            that isn't blank, see ``opened_line_break``; often nothing.
        context_segments: those of the segments that show other files.
    """

    segments: tuple[Segment, ...]
    layout: LayoutName
    cut: int = 0
    document: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    template: str | None = None
    line_break: str = ""
    context_segments: tuple[Segment, ...] = ()

    def text_of(self, *roles: Role) -> str:
        """Return the text of all segments with one of these roles, joined."""
        return "".join(
            segment.text
            for segment in self.segments
            if isinstance(segment, TextSegment) and segment.role in roles
        )

    @property
    def planned_prefix(self) -> str:
        """All text before the caret that the model sees, without the context."""
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
    fragments: Sequence[str] | None = None,
    context_segments: Sequence[Segment] = (),
) -> tuple[tuple[Segment, ...], LayoutName]:
    """Return the segments of a prompt and the name of its layout.

    Suffix-first formats ignore the cut: they have one order, ``SUF S PRE P [MID]``. Context goes
    before everything else where the family has a token for files, and before P otherwise.

    Args:
        format: the model's FIM format.
        prefix, suffix: texts before and after the caret.
        cut: characters of the prefix before the suffix, 0 to len(prefix).
        fragments: the increment prefix[cut:] in parts that are tokenised separately; None is one
            part.
        context_segments: segments of ``midfill.infill.context_files``.
    """
    before, inside = (
        (context_segments, ()) if format.file_separator is not None else ((), context_segments)
    )
    segments: list[Segment | None]
    if format.order == "spm":
        head = [*inside, _text(prefix, "prefix"), format.middle]
        segments = [*before, format.suffix, _text(suffix, "suffix"), format.prefix, *head]
        return _present(segments), "spm"
    if fragments is None:
        fragments = (prefix[cut:],)
    segments = [
        *before,
        format.prefix,
        *inside,
        _text(prefix[:cut], "prefix"),
        format.suffix,
        _text(suffix, "suffix"),
        format.middle,
        *(_text(fragment, "increment") for fragment in fragments),
    ]
    return _present(segments), "psm" if cut == len(prefix) else "spm" if cut == 0 else "efim"


def in_psm_order(format: FimFormat, layout: PromptLayout) -> PromptLayout | None:
    """Return the same prompt with all text before the caret before the suffix: PSM.

    Its head and increment stay two segments, so that what is known of them is used again.

    Args:
        format: the model's FIM format, with which the layout was made.
        layout: any layout of the planner.

    Returns:
        The layout; None for a raw prompt, and where the format's order is not PSM.
    """
    if format.order != "psm" or format.suffix not in layout.segments:
        return None
    middle = layout.segments.index(format.suffix)
    increment = _text(layout.text_of("increment"), "prefix")
    before, after = layout.segments[:middle], layout.segments[middle:]
    kept = [
        segment for segment in after if isinstance(segment, Sentinel) or segment.role != "increment"
    ]
    segments = _present([*before, increment, *kept])
    return replace(layout, segments=segments, layout="psm", cut=len(layout.planned_prefix))


def _text(text: str, role: Role) -> TextSegment | None:
    return TextSegment(text, role) if text else None


def _present(segments: list[Segment | None]) -> tuple[Segment, ...]:
    return tuple(segment for segment in segments if segment is not None)
