"""Holes: which characters of a document an example hides, and how much it shows around them."""

import math
import random
from dataclasses import dataclass
from typing import Literal

from midfill.infill.cut import first_cut
from midfill.training.recipe import DataRecipe

HoleKind = Literal["line", "block", "span"]
LayoutKind = Literal["psm", "spm", "efim", "planned"]


@dataclass(frozen=True, slots=True)
class Hole:
    """One infilling task, in characters of its document.

    ``prefix = text[start:caret]``, ``middle = text[caret:end]``, ``suffix = text[end:stop]``.

    Attributes:
        kind: "line": from the caret to the end of its line; "block": whole lines, or from behind
            a line's indent to the end of that line or of one below; "span": any characters.
        start, caret, end, stop: 0 <= start <= caret < end <= stop.
        cut: characters of the prefix before the suffix in the prompt (the k of EFIM).
        layout: how the cut was drawn: behind the prefix, before it, anywhere, or where the planner
            makes its first one.
    """

    kind: HoleKind
    start: int
    caret: int
    end: int
    stop: int
    cut: int
    layout: LayoutKind


def draw_hole(text: str, recipe: DataRecipe, draw: random.Random) -> Hole | None:
    """A random hole, its context and its layout; None where the draw hit no room for one.

    The text must hold LF line ends only.
    """
    if not text:
        return None
    weights = (recipe.line, recipe.block, recipe.span)
    kind: HoleKind = draw.choices(("line", "block", "span"), weights)[0]
    caret, end = _hidden(kind, text, recipe, draw)
    if end <= caret or not text[caret:end].strip():
        return None
    start, stop = _shown(text, caret, end, recipe, draw)
    layout: LayoutKind = draw.choices(
        ("psm", "spm", "efim", "planned"), (recipe.psm, recipe.spm, recipe.efim, recipe.planned)
    )[0]
    length = caret - start
    anywhere = draw.randint(0, length)
    planned = first_cut(text[start:caret])
    cut = {"psm": length, "spm": 0, "efim": anywhere, "planned": planned}[layout]
    return Hole(kind, start, caret, end, stop, cut, layout)


def _hidden(kind: HoleKind, text: str, recipe: DataRecipe, draw: random.Random) -> tuple[int, int]:
    """First character of a hole and the one behind its last."""
    at = draw.randrange(len(text))
    if kind == "span":
        return at, min(len(text), at + _log_uniform(1, recipe.span_characters, draw))
    line_start, line_end = _line_around(text, at)
    if kind == "line":
        return at, line_end
    further = draw.randrange(recipe.block_lines)
    whole, single = draw.random() < recipe.whole_lines, draw.random() < 0.5
    end = line_end
    for _ in range(0 if whole and single else further):
        if end < len(text):
            end = _line_around(text, end + 1)[1]
    if whole:
        return line_start, min(len(text), end + 1)
    # As an editor leaves it: the caret behind the indent, what follows on its own line.
    indent = len(text[line_start:line_end]) - len(text[line_start:line_end].lstrip())
    return line_start + indent, end


def _shown(
    text: str, caret: int, end: int, recipe: DataRecipe, draw: random.Random
) -> tuple[int, int]:
    """Where the shown text begins and stops: at line ends, as an editor's window does."""
    if draw.random() < recipe.long_share:
        before = _log_uniform(recipe.prefix_characters[1], recipe.long_characters, draw)
        after = _log_uniform(recipe.suffix_characters[1], recipe.long_characters, draw)
    else:
        before = _log_uniform(*recipe.prefix_characters, draw)
        after = _log_uniform(*recipe.suffix_characters, draw)
    start = _line_around(text, max(0, caret - before))[0]
    stop = _line_around(text, min(len(text), end + after))[1]
    if draw.random() < recipe.empty_suffix:
        stop = end
    return start, stop


def _line_around(text: str, at: int) -> tuple[int, int]:
    """Start of the line a position is in, and its end before the line feed."""
    end = text.find("\n", at)
    return text.rfind("\n", 0, at) + 1, len(text) if end < 0 else end


def _log_uniform(low: int, high: int, draw: random.Random) -> int:
    low, high = max(1, low), max(1, low, high)
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))
