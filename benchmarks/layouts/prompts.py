"""The layouts of a session's prompts, and what each of them computes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from benchmarks.layouts.cost import PromptEncoder, Tokenize, count_computed
from benchmarks.layouts.offline_optimum import offline_cuts
from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.layout import Segment, TextSegment, lay_out
from midfill.infill.planner import Planner, PlannerOptions
from midfill.infill.request import InfillRequest
from midfill.infill.window import WindowRule
from midfill_lab.bench.editing import Round

FORMAT = FimFormat("bench", Sentinel("<PRE>", 0), Sentinel("<SUF>", 1), Sentinel("<MID>", 2))

Prompts = Sequence[Sequence[Segment]]


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """A session as midfill's planner lays it out.

    Attributes:
        prompts: segments of each request.
        cuts: characters before the suffix in each request.
        milliseconds: processor time of planning each request.
    """

    prompts: list[tuple[Segment, ...]]
    cuts: list[int]
    milliseconds: list[float]


def plan(
    rounds: Sequence[Round], tokenize: Tokenize, window: WindowRule | None = None
) -> PlannedSession:
    """Lay a session out by a new planner, which sees the texts alone.

    Args:
        rounds: the session.
        tokenize: decides where the planner may cut.
        window: how much of each document to show; None shows all that is sent.
    """

    @lru_cache(1024)
    def keeps_tokens(before: str, after: str) -> bool:
        return tokenize(before) + tokenize(after) == tokenize(before + after)

    planner = Planner(FORMAT, PlannerOptions(keeps_tokens=keeps_tokens, window=window))
    planned = PlannedSession([], [], [])
    for edit in rounds:
        request = InfillRequest(prefix=edit.prefix, suffix=edit.suffix)
        started = time.thread_time()
        layout = planner.plan_and_record(request)
        planned.milliseconds.append(1000 * (time.thread_time() - started))
        planned.prompts.append(layout.segments)
        planned.cuts.append(layout.cut)
    return planned


def best_cuts(rounds: Sequence[Round], starts: Sequence[Sequence[int]]) -> list[int]:
    """Return the offline optimum, file by file; see ``offline_cuts``."""
    places: dict[str, list[int]] = {}
    for number, edit in enumerate(rounds):
        places.setdefault(edit.document, []).append(number)
    cuts = [0] * len(rounds)
    for numbers in places.values():
        own = [[start[number] for number in numbers] for start in starts]
        best = offline_cuts([rounds[number] for number in numbers], own)
        for number, cut in zip(numbers, best, strict=True):
            cuts[number] = cut
    return cuts


def cut_prompts(rounds: Sequence[Round], cuts: Sequence[int]) -> Prompts:
    """Lay the requests out with given cuts."""
    return [
        lay_out(FORMAT, edit.prefix, edit.suffix, cut)[0]
        for edit, cut in zip(rounds, cuts, strict=True)
    ]


def count(rounds: Sequence[Round], prompts: Prompts, encode: PromptEncoder) -> list[int]:
    """Return the tokens that each request computes.

    Completions that were shown have been generated, so they are cached too. They are tokenized
    together with the increment, as by token healing.
    """
    generated = [
        encode(with_answer(segments, edit.shown))
        for edit, segments in zip(rounds, prompts, strict=True)
    ]
    return count_computed([encode(segments) for segments in prompts], generated)


def most_over_typed(rounds: Sequence[Round], computed: Sequence[int], encode: PromptEncoder) -> int:
    """Return the most tokens over those typed that a request after typing at the caret computes."""
    worst = 0
    for before, edit, cost in zip(rounds, rounds[1:], computed[1:], strict=False):
        typed = edit.prefix[len(before.prefix) :]
        if edit.kind == "type" and _follows(before, edit):
            worst = max(worst, cost - len(encode.text(typed)))
    return worst


def most_for_accepting(rounds: Sequence[Round], computed: Sequence[int]) -> int:
    """Return the most tokens that a request after accepting a completion computes."""
    return max(
        (
            cost
            for before, edit, cost in zip(rounds, rounds[1:], computed[1:], strict=False)
            if edit.kind in ("accept", "partial") and _follows(before, edit)
        ),
        default=0,
    )


def costs_of_moves(rounds: Sequence[Round], computed: Sequence[int]) -> list[int]:
    """Return the tokens that each request after a move of the caret computes.

    The text is that of the request before; files that are opened or returned to don't count.
    """
    return [
        cost
        for before, edit, cost in zip(rounds, rounds[1:], computed[1:], strict=False)
        if edit.document == before.document
        and edit.prefix != before.prefix
        and edit.prefix + edit.suffix == before.prefix + before.suffix
    ]


def _follows(before: Round, edit: Round) -> bool:
    """Whether text was inserted at the caret and nothing else changed."""
    same_place = (before.document, before.suffix) == (edit.document, edit.suffix)
    return same_place and edit.prefix.startswith(before.prefix)


def with_answer(segments: Sequence[Segment], answer: str) -> Sequence[Segment]:
    """Return a prompt with the answer to it."""
    if not answer:
        return segments
    last = segments[-1]
    if isinstance(last, TextSegment):
        return [*segments[:-1], TextSegment(last.text + answer, last.role)]
    return [*segments, TextSegment(answer, "increment")]
