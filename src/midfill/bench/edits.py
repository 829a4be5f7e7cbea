"""``bench edits``: what editing sessions cost under each prompt layout, counted without a model.

Sessions come from the editing mix over files of the standard library (``edits_sessions``) and
from git histories (``edits_git``). Every session is laid out in five ways:

    psm          PRE prefix SUF suffix MID
    spm          PRE SUF suffix MID prefix
    efim         the cut of a file's first request, moved only when a deletion passes it
    planner      midfill's own, from the texts alone: no file names
    clairvoyant  the cheapest cuts with the whole session known beforehand (``edits_clairvoyant``)

and again as a client would send it that knows only a window around the caret. Cost is tokens that
no earlier prompt of the session begins with (``edits_cost``); the unit is a stand-in for a model's
tokens unless a tokenizer is given.
"""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from midfill.bench.documents import standard_library_documents
from midfill.bench.edits_clairvoyant import clairvoyant_cuts
from midfill.bench.edits_cost import PieceTokenizer, PromptEncoder, Tokenize, count_computed
from midfill.bench.edits_editor import Round, RoundKind, windowed
from midfill.bench.edits_git import git_session
from midfill.bench.edits_sessions import SESSION_KINDS, edit_session
from midfill.bench.machine import Machine, describe_machine
from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.layout import Segment, TextSegment, lay_out
from midfill.infill.planner import Planner
from midfill.infill.request import InfillRequest

FORMAT = FimFormat("bench", Sentinel("<PRE>", 0), Sentinel("<SUF>", 1), Sentinel("<MID>", 2))
WINDOWS: dict[str, dict[str, int]] = {"4000 characters": {"characters": 4000}, "60 lines": {"lines": 60}}


class EditsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to replay.

    Attributes:
        mixes: sessions of the editing mix.
        rounds: requests of each of them, and of each repository.
        kind_rounds: requests of the sessions with one kind of action each; 0 leaves them out.
        repositories: local git repositories to replay as well.
        seed: all chance follows from it.
    """

    mixes: int = 5
    rounds: int = 1000
    kind_rounds: int = 600
    repositories: list[str] = []
    seed: int = 0


QUICK = EditsOptions(mixes=3, rounds=400, kind_rounds=200)


class SessionResult(msgspec.Struct, frozen=True, kw_only=True):
    """One session's figures.

    Attributes:
        name: kind of session, or repository.
        requests: how many.
        characters: mean length of prefix and suffix together.
        tokens_computed: by layout.
        windowed: tokens computed by window and layout ("psm" and "efim" on the windows as sent,
            "planner").
        most_over_typed: worst request after typing: tokens computed less tokens typed.
        most_for_accepting: worst request after a completion was accepted, tokens computed.
        planning_ms: processor time of planning a request: median, 99th percentile, worst.
    """

    name: str
    requests: int
    characters: int
    tokens_computed: dict[str, int]
    windowed: dict[str, dict[str, int]]
    most_over_typed: int
    most_for_accepting: int
    planning_ms: tuple[float, float, float]


class EditsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call counted.

    Attributes:
        tokens_computed: by layout, over all sessions of the mix.
        windowed: the same sessions in windows, all windows of ``WINDOWS`` together.
        unit: what a token is.
        planning_ms: processor time of planning on 100,000-character documents: median, 99th
            percentile, worst.
    """

    tokens_computed: dict[str, int]
    windowed: dict[str, int]
    sessions: list[SessionResult]
    planning_ms: tuple[float, float, float]
    unit: str
    options: EditsOptions
    machine: Machine


def run_edits(
    options: EditsOptions | None = None,
    *,
    tokenize: Tokenize | None = None,
    unit: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> EditsReport:
    """Replay all sessions under all layouts.

    Args:
        options: what to replay; ``QUICK`` takes about half a minute.
        tokenize, unit: a model's tokenizer (text to ids, no special tokens) and its name.
        progress: is told what is being replayed.

    Raises:
        HistoryError: a repository cannot be read.
    """
    options = options or EditsOptions()
    tokenize = tokenize or PieceTokenizer()
    results = []
    mixes: list[SessionResult] = []
    for name, rounds in _sessions(options):
        progress(name)
        result = measure_session(name, rounds, tokenize)
        (mixes if name == "mix" else results).append(result)
    progress("planning at 100,000 characters")
    return EditsReport(
        tokens_computed=_sum(result.tokens_computed for result in mixes),
        windowed=_sum(counts for result in mixes for counts in result.windowed.values()),
        sessions=[_joined(mixes), *results],
        planning_ms=planning_time(options.seed),
        unit=unit or "pieces of words, about 3.5 characters",
        options=options,
        machine=describe_machine(),
    )


def measure_session(name: str, rounds: Sequence[Round], tokenize: Tokenize) -> SessionResult:
    """One session under all layouts."""
    encode = PromptEncoder(tokenize)
    plans, times = plan_session(rounds)
    planned = [cut for _, cut in plans]
    fixed = fixed_cuts(rounds)
    cuts = {
        "psm": [len(one.prefix) for one in rounds],
        "spm": [0] * len(rounds),
        "efim": fixed,
        "clairvoyant": best_cuts(rounds, [planned, fixed]),
    }
    counts = {layout: _count(rounds, _segments(rounds, where), encode) for layout, where in cuts.items()}
    planner = _count(rounds, [segments for segments, _ in plans], encode)
    counts["planner"] = planner
    over, accepting = worst_cases(rounds, planner, [segments for segments, _ in plans], encode)
    return SessionResult(
        name=name,
        requests=len(rounds),
        characters=sum(len(one.prefix) + len(one.suffix) for one in rounds) // len(rounds),
        tokens_computed={layout: sum(count) for layout, count in counts.items()},
        windowed={window: _count_windowed(windowed(rounds, **size), encode) for window, size in WINDOWS.items()},
        most_over_typed=over,
        most_for_accepting=accepting,
        planning_ms=percentiles(times),
    )


def plan_session(rounds: Sequence[Round]) -> tuple[list[tuple[Sequence[Segment], int]], list[float]]:
    """A fresh planner's segments and cut for each request, and the milliseconds each took."""
    planner = Planner(FORMAT)
    plans: list[tuple[Sequence[Segment], int]] = []
    times = []
    for one in rounds:
        request = InfillRequest(prefix=one.prefix, suffix=one.suffix)
        started = time.thread_time()
        layout = planner.plan(request)
        times.append(1000 * (time.thread_time() - started))
        plans.append((layout.segments, layout.cut))
    return plans, times


def fixed_cuts(rounds: Sequence[Round]) -> list[int]:
    """EFIM as published: each file's first prefix stays before the suffix as long as it can."""
    heads: dict[str, str] = {}
    cuts = []
    for one in rounds:
        head = heads.get(one.document)
        if head is None or not one.prefix.startswith(head):
            head = heads[one.document] = one.prefix
        cuts.append(len(head))
    return cuts


def best_cuts(rounds: Sequence[Round], starts: Sequence[Sequence[int]]) -> list[int]:
    """The clairvoyant's cuts, file by file."""
    places: dict[str, list[int]] = {}
    for number, one in enumerate(rounds):
        places.setdefault(one.document, []).append(number)
    cuts = [0] * len(rounds)
    for numbers in places.values():
        own = [[start[number] for number in numbers] for start in starts]
        best = clairvoyant_cuts([rounds[number] for number in numbers], own)
        for number, cut in zip(numbers, best, strict=True):
            cuts[number] = cut
    return cuts
