"""Conditions: the ways of asking a model for the same hole, as prompts."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from midfill.errors import MidfillError, OptionError
from midfill.infill.context_files import newest
from midfill.infill.cut_places import KeepsTokens, keeps_any_tokens
from midfill.infill.formats import FimFormat
from midfill.infill.layout import PromptLayout, TextSegment, lay_out
from midfill.infill.prefix_cut import CutRule, first_cut
from midfill.infill.request import InfillRequest
from midfill.infill.window import WindowRule
from midfill_lab.evaluation.problems import Problem

SuffixPosition = Literal["none", "end", "start", "random", "distance", "planner"]

_TYPED_CHARACTERS = 40
_MAX_FRAGMENT_CHARACTERS = 8


def required(format: FimFormat | None) -> FimFormat:
    """Return a model's FIM tokens.

    Raises:
        MidfillError: it has none.
    """
    if format is None:
        raise MidfillError(
            "the model has no FIM tokens that midfill knows: name them with --fim-tokens"
        )
    return format


@dataclass(frozen=True, slots=True)
class Condition:
    """One way of asking.

    Attributes:
        name: on the command line and in tables.
        suffix: where the suffix is in the prompt: "end" after the whole prefix (PSM), "start"
            before it (SPM), "random" at a random character of it (EFIM), "distance" at least
            ``least_increment`` characters before the caret, "planner" where midfill puts it.
            "none": the suffix is not in the prompt.
        healing: token healing: the model writes the last tokens before the caret again.
        least_increment: see ``infill/prefix_cut.py``.
        window: how much of the whole document the planner shows; None gives it the text that the
            other conditions have.
        empty_threshold: see ``EngineRequest``; None takes what the model says.
        method: compresses the prompt's KV, see ``EngineRequest``.
        snippets: how many characters of the problem's snippets to show; None shows none.
        judged: whether answers are reported with how sure they are.
        candidates: see ``SamplingParams``.
    """

    name: str
    suffix: SuffixPosition
    healing: bool = False
    least_increment: int = 0
    window: WindowRule | None = None
    empty_threshold: float | None = None
    method: str | None = None
    snippets: int | None = None
    judged: bool = False
    candidates: int = 1

    @property
    def needs_cut(self) -> bool:
        """Whether it needs a model that reads ``PRE prefix[:k] SUF suffix MID prefix[k:]``."""
        return self.suffix in ("end", "start", "random", "distance")


CONDITIONS: tuple[Condition, ...] = (
    Condition("prefix-only", "none"),
    Condition("prefix-only+healing", "none", healing=True),
    Condition("psm", "end"),
    Condition("spm", "start"),
    Condition("efim", "random"),
    Condition("efim+healing", "random", healing=True),
    Condition("auto", "planner", healing=True),
)
"""All conditions. In psm the caret follows a sentinel, so there is no token to heal. ``auto`` is
what users get: its answers end where they begin to repeat the suffix; others are not changed."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How the prompts of a run are made.

    Attributes:
        before, after: maximum characters of prefix and suffix in a prompt.
        typed: tokenise the last characters after MID in fragments, as if typed.
        seed: of random cuts and fragments.
        keeps_tokens: where the model's tokenizer allows a cut at a distance.
    """

    before: int = 2000
    after: int = 1000
    typed: bool = False
    seed: int = 0
    keeps_tokens: KeepsTokens = keeps_any_tokens


def parse_conditions(text: str) -> tuple[str, ...]:
    """Parse names of conditions, separated by commas.

    Raises:
        MidfillError: an unknown name, or none.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    known = [condition.name for condition in CONDITIONS]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = ", ".join(unknown) or "nothing"
        raise OptionError(f"--conditions names {what}; there are {', '.join(known)}")
    return names


def choose_conditions(
    names: Sequence[str] | None, format: FimFormat | None, *, remote: bool = False
) -> tuple[Condition, ...]:
    """Return the conditions to measure, in the order of ``CONDITIONS``.

    Args:
        names: of conditions; None takes all that apply to the model.
        format: the model's FIM format, None if it has none.
        remote: whether the model is behind an HTTP API, where healing can't be requested.

    Raises:
        MidfillError: a named condition doesn't apply to the model.
    """
    chosen = []
    for condition in CONDITIONS:
        if names is not None and condition.name not in names:
            continue
        obstacle = _obstacle(condition, format, remote)
        if obstacle is None:
            chosen.append(condition)
        elif names is not None:
            raise MidfillError(f"condition {condition.name} {obstacle}")
    return tuple(chosen)


def with_methods(conditions: Sequence[Condition], methods: Sequence[str]) -> tuple[Condition, ...]:
    """Return the conditions, then each of them once more with each method.

    A condition "auto" with "cake:budget=256" is called "auto cake:budget=256". The prompts are the
    same.
    """
    compressed = [
        replace(condition, name=f"{condition.name} {method}", method=method)
        for method in dict.fromkeys(methods)
        for condition in conditions
    ]
    return (*conditions, *compressed)


def with_candidates(conditions: Sequence[Condition], candidates: int) -> tuple[Condition, ...]:
    """Return the conditions, then once more, with candidates, those that midfill lays out itself.

    "auto" with 2 is called "auto candidates=2".
    """
    if candidates == 1:
        return tuple(conditions)
    further = [
        replace(condition, name=f"{condition.name} candidates={candidates}", candidates=candidates)
        for condition in conditions
        if condition.suffix == "planner"
    ]
    return (*conditions, *further)


def make_prompt(
    condition: Condition, format: FimFormat | None, problem: Problem, options: PromptOptions
) -> PromptLayout | InfillRequest:
    """Make the prompt of a problem: a layout, or a request that midfill lays out itself.

    The random cut depends on the problem and the seed alone, so all models and both efim
    conditions get the same one.
    """
    # A tenant of its own for each prompt: what was asked before doesn't influence cut and window.
    if condition.window is not None:
        return InfillRequest(
            prefix=problem.prefix,
            suffix=problem.suffix,
            tenant=f"{problem.id} {condition.name}",
            window=condition.window,
        )
    prefix, suffix = window(problem, options.before, options.after)
    if condition.snippets is not None:
        return InfillRequest(
            prefix=prefix,
            suffix=suffix,
            tenant=f"{problem.id} {condition.name}",
            window="as-sent",
            context_files=newest(problem.snippets, condition.snippets),
        )
    if condition.suffix == "planner":
        return InfillRequest(prefix=prefix, suffix=suffix, tenant=problem.id, window="as-sent")
    if condition.suffix == "none" or format is None:
        segments = (TextSegment(prefix, "prefix"),) if prefix else ()
        stops = () if format is None else format.stop_token_ids
        return PromptLayout(
            segments=segments, layout="prefix-only", cut=len(prefix), stop_token_ids=stops
        )
    rng = random.Random(f"{options.seed}/{problem.id}")
    cut = rng.randint(0, len(prefix))
    if condition.suffix == "distance":
        cut = first_cut(prefix, CutRule(condition.least_increment), options.keeps_tokens)
    elif condition.suffix != "random":
        cut = len(prefix) if condition.suffix == "end" else 0
    fragments = split_as_typed(prefix[cut:], rng) if options.typed else None
    laid_out, name = lay_out(format, prefix, suffix, cut, fragments=fragments)
    return PromptLayout(
        segments=laid_out, layout=name, cut=cut, stop_token_ids=format.stop_token_ids
    )


def window(problem: Problem, before: int, after: int) -> tuple[str, str]:
    """Return prefix and suffix as the model sees them: whole lines, if one fits.

    Args:
        problem: the problem.
        before: maximum characters of the prefix, which then starts with a line.
        after: maximum characters of the suffix, which then ends with a line.
    """
    prefix, suffix = problem.prefix, problem.suffix
    if len(prefix) > before:
        kept = prefix[len(prefix) - before - 1 :]  # one more shows whether a line starts here
        _, line_break, rest = kept.partition("\n")
        prefix = rest if line_break and rest else kept[1:]
    if len(suffix) > after:
        kept = suffix[:after]
        suffix = kept[: kept.rfind("\n") + 1] or kept
    return prefix, suffix


def split_as_typed(increment: str, rng: random.Random) -> tuple[str, ...]:
    """Split the last 40 characters of an increment into fragments of 1 to 8 characters."""
    end = max(0, len(increment) - _TYPED_CHARACTERS)
    fragments = [increment[:end]]
    while end < len(increment):
        start, end = end, end + rng.randint(1, _MAX_FRAGMENT_CHARACTERS)
        fragments.append(increment[start:end])
    return tuple(fragment for fragment in fragments if fragment)


def _obstacle(condition: Condition, format: FimFormat | None, remote: bool) -> str | None:
    """Return why a condition doesn't apply to a model, None if it does."""
    if condition.needs_cut and format is None:
        return "needs the model's FIM tokens: name them with --fim-tokens PRE,SUF,MID"
    if condition.needs_cut and format is not None and format.order != "psm":
        return f"doesn't apply to this model: {format.name} reads the suffix first; use auto"
    if condition.healing and condition.suffix != "planner" and remote:
        return "needs a model loaded here: a server can't be told to heal a given prompt"
    return None
