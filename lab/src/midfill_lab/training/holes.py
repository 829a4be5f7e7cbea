"""Holes: which characters of a document an example hides, and how much context it shows."""

import math
import random
from dataclasses import dataclass
from typing import Literal

from midfill.infill.cut_places import KeepsTokens, keeps_any_tokens
from midfill.infill.planner import opened_line_break
from midfill.infill.prefix_cut import CutRule, first_cut
from midfill_lab.training.recipe import DataRecipe

HoleKind = Literal["line", "block", "span", "nothing"]
LayoutKind = Literal["psm", "spm", "efim", "planned"]


_AT_LINE_END = 0.7  # share of the carets where nothing is missing


@dataclass(frozen=True, slots=True)
class Hole:
    """One infilling task, in characters of its document.

    ``prefix = text[start:caret]``, ``middle = text[caret:end]``, and
    ``suffix = line_break + text[end:stop]``.

    Attributes:
        kind: "line": from the caret to the end of its line. "block": whole lines, or from after
            a line's indentation to the end of that line or a later one. "span": any characters.
            "nothing": none, at the start or the end of a line.
        start, caret, end, stop: 0 <= start <= caret <= end <= stop.
        cut: characters of the prefix before the suffix in the prompt (EFIM's k).
        layout: how the cut was chosen: after the prefix ("psm"), before it ("spm"), at a random
            character ("efim"), or where the planner cuts a new document ("planned").
        line_break: what the server would put before the suffix (``infill.planner``).
    """

    kind: HoleKind
    start: int
    caret: int
    end: int
    stop: int
    cut: int
    layout: LayoutKind
    line_break: str = ""


def draw_hole(
    text: str,
    recipe: DataRecipe,
    rng: random.Random,
    keeps_tokens: KeepsTokens = keeps_any_tokens,
) -> Hole | None:
    """Draw a hole, its context and its layout; return None if the hole would be blank.

    Args:
        text: the document, with LF line ends only.
        recipe: what to draw.
        rng: the random source.
        keeps_tokens: where the tokenizer allows the planner to cut.
    """
    if not text:
        return None
    weights = (recipe.line, recipe.block, recipe.span, recipe.nothing)
    kind: HoleKind = rng.choices(("line", "block", "span", "nothing"), weights)[0]
    caret, end = _draw_middle(kind, text, recipe, rng)
    if kind != "nothing" and not text[caret:end].strip():
        return None
    start, stop = _draw_context(text, caret, end, recipe, rng)
    line_break = ""
    if recipe.opened_lines and (kind == "nothing" or text[caret:end].endswith("\n")):
        line_break = opened_line_break(text[start:caret], text[end:stop])
        if kind != "nothing":
            # The hole leaves its last break to the suffix instead of getting another one.
            end, line_break = end - len(line_break), ""
    layout: LayoutKind = rng.choices(
        ("psm", "spm", "efim", "planned"), (recipe.psm, recipe.spm, recipe.efim, recipe.planned)
    )[0]
    length = caret - start
    random_cut = rng.randint(0, length)
    rule = CutRule(least_increment=_log_uniform(*recipe.increment_characters, rng))
    planned_cut = first_cut(text[start:caret], rule, keeps_tokens)
    cut = {"psm": length, "spm": 0, "efim": random_cut, "planned": planned_cut}[layout]
    return Hole(kind, start, caret, end, stop, cut, layout, line_break)


def _draw_middle(
    kind: HoleKind, text: str, recipe: DataRecipe, rng: random.Random
) -> tuple[int, int]:
    """Draw the start and the end of a hole."""
    at = rng.randrange(len(text))
    if kind == "span":
        return at, min(len(text), at + _log_uniform(1, recipe.span_characters, rng))
    line_start, line_end = _line_around(text, at)
    if kind == "nothing":
        caret = line_end if rng.random() < _AT_LINE_END else line_start
        return caret, caret
    if kind == "line":
        return at, line_end
    further = rng.randrange(recipe.block_lines)
    whole, single = rng.random() < recipe.whole_lines, rng.random() < 0.5
    end = line_end
    for _ in range(0 if whole and single else further):
        if end < len(text):
            end = _line_around(text, end + 1)[1]
    if whole:
        return line_start, min(len(text), end + 1)
    # As an editor leaves it: the caret after the indentation, the suffix on its own line.
    indent = len(text[line_start:line_end]) - len(text[line_start:line_end].lstrip())
    return line_start + indent, end


def _draw_context(
    text: str, caret: int, end: int, recipe: DataRecipe, rng: random.Random
) -> tuple[int, int]:
    """Draw where the shown text starts and stops: whole lines, as in an editor's window."""
    if rng.random() < recipe.long_share:
        before = _log_uniform(recipe.prefix_characters[1], recipe.long_characters, rng)
        after = _log_uniform(recipe.suffix_characters[1], recipe.long_characters, rng)
    else:
        before = _log_uniform(*recipe.prefix_characters, rng)
        after = _log_uniform(*recipe.suffix_characters, rng)
    start = _line_around(text, max(0, caret - before))[0]
    stop = _line_around(text, min(len(text), end + after))[1]
    if rng.random() < recipe.empty_suffix:
        stop = end
    return start, stop


def _line_around(text: str, at: int) -> tuple[int, int]:
    """Return the start of the line at a position, and its end before the line feed."""
    end = text.find("\n", at)
    return text.rfind("\n", 0, at) + 1, len(text) if end < 0 else end


def _log_uniform(low: int, high: int, rng: random.Random) -> int:
    low, high = max(1, low), max(1, low, high)
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))
