"""Conditions: the ways of asking a model for the same hole, as prompts."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from midfill.errors import MidfillError
from midfill.evaluation.problems import Problem
from midfill.infill.formats import FimFormat
from midfill.infill.layout import PromptLayout, TextSegment, lay_out
from midfill.infill.request import InfillRequest

Cut = Literal["none", "end", "start", "random", "planner"]

_TYPED_CHARACTERS = 40
_LONGEST_PIECE = 8


@dataclass(frozen=True, slots=True)
class Condition:
    """One way of asking.

    Attributes:
        name: on the command line and in tables.
        cut: where the suffix stands in the prompt: "end" after the whole prefix (PSM), "start"
            before it (SPM), "random" at a random character of it (EFIM), "planner" where midfill
            puts it; "none": the suffix is not shown.
        healing: the model writes the last tokens before the caret again, see ``infill.healing``.
    """

    name: str
    cut: Cut
    healing: bool = False

    @property
    def needs_cut(self) -> bool:
        """Whether it takes a model that reads ``PRE P SUF S MID I``."""
        return self.cut in ("end", "start", "random")


CONDITIONS: tuple[Condition, ...] = (
    Condition("prefix-only", "none"),
    Condition("prefix-only+healing", "none", healing=True),
    Condition("psm", "end"),
    Condition("spm", "start"),
    Condition("efim", "random"),
    Condition("efim+healing", "random", healing=True),
    Condition("auto", "planner", healing=True),
)
"""Every condition. A caret after a sentinel (psm) has nothing that could be healed."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How all prompts of a run are made.

    Attributes:
        before, after: most characters of prefix and suffix that the model sees.
        typed: the increment's last characters are tokenised in pieces, as they would be typed.
        seed: of cuts and pieces.
    """

    before: int = 2000
    after: int = 1000
    typed: bool = False
    seed: int = 0


def parse_conditions(text: str) -> tuple[str, ...]:
    """Names of conditions as on the command line, separated by commas.

    Raises:
        MidfillError: an unknown name, or none.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    known = [condition.name for condition in CONDITIONS]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = ", ".join(unknown) or "nothing"
        raise MidfillError(f"--conditions names {what}; there are {', '.join(known)}")
    return names


def choose_conditions(
    names: Sequence[str] | None, format: FimFormat | None, *, remote: bool = False
) -> tuple[Condition, ...]:
    """The conditions to measure.

    Args:
        names: of conditions; None takes all that the model can do.
        format: the model's FIM format, if it has one.
        remote: the model is behind an HTTP API, which can't be told to heal a given prompt.

    Raises:
        MidfillError: one that this model can't be asked in.
    """
    kept = []
    for condition in CONDITIONS:
        if names is not None and condition.name not in names:
            continue
        problem = _problem(condition, format, remote)
        if problem is None:
            kept.append(condition)
        elif names is not None:
            raise MidfillError(f"condition {condition.name} {problem}")
    return tuple(kept)


def make_prompt(
    condition: Condition, format: FimFormat | None, problem: Problem, options: PromptOptions
) -> PromptLayout | InfillRequest:
    """What to ask a model: a layout, or for "planner" a request that it lays out itself.

    The random cut depends on the problem and the seed alone, so all models and both efim
    conditions are given the same one.
    """
    prefix, suffix = window(problem, options.before, options.after)
    if condition.cut == "planner":
        # A tenant of its own: no other problem's document decides the cut.
        return InfillRequest(prefix=prefix, suffix=suffix, tenant=problem.id)
    if condition.cut == "none" or format is None:
        shown = (TextSegment(prefix, "prefix"),) if prefix else ()
        stops = () if format is None else format.stop_token_ids
        return PromptLayout(
            segments=shown, layout="prefix-only", cut=len(prefix), stop_token_ids=stops
        )
    chance = random.Random(f"{options.seed}/{problem.id}")
    cut = chance.randint(0, len(prefix))
    if condition.cut != "random":
        cut = len(prefix) if condition.cut == "end" else 0
    fragments = typed_fragments(prefix[cut:], chance) if options.typed else None
    segments, name = lay_out(format, prefix, suffix, cut, fragments=fragments)
    return PromptLayout(
        segments=segments, layout=name, cut=cut, stop_token_ids=format.stop_token_ids
    )


def window(problem: Problem, before: int, after: int) -> tuple[str, str]:
    """Prefix and suffix as the model sees them: whole lines, if a line fits.

    Args:
        before: most characters of the prefix, from a line start on.
        after: most characters of the suffix, up to a line's end.
    """
    prefix, suffix = problem.prefix, problem.suffix
    if len(prefix) > before:
        kept = prefix[len(prefix) - before - 1 :]  # the character before tells if a line starts
        _, line_break, rest = kept.partition("\n")
        prefix = rest if line_break and rest else kept[1:]
    if len(suffix) > after:
        kept = suffix[:after]
        suffix = kept[: kept.rfind("\n") + 1] or kept
    return prefix, suffix


def typed_fragments(increment: str, chance: random.Random) -> tuple[str, ...]:
    """An increment whose last 40 characters came in pieces of 1 to 8 characters."""
    end = max(0, len(increment) - _TYPED_CHARACTERS)
    pieces = [increment[:end]]
    while end < len(increment):
        start, end = end, end + chance.randint(1, _LONGEST_PIECE)
        pieces.append(increment[start:end])
    return tuple(piece for piece in pieces if piece)


def _problem(condition: Condition, format: FimFormat | None, remote: bool) -> str | None:
    """Why a model can't be asked in a condition, if it can't."""
    if condition.needs_cut and format is None:
        return "needs the model's FIM tokens: name them with --fim-tokens PRE,SUF,MID"
    if condition.needs_cut and format is not None and format.order != "psm":
        return f"means nothing to this model: {format.name} reads the suffix first; use auto"
    if condition.healing and condition.cut != "planner" and remote:
        return "needs a model loaded here: a server can't be told to heal a given prompt"
    return None
