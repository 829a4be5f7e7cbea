"""Count what editing sessions cost under each prompt layout, without a model.

Sessions come from an editing mix over files of the standard library (``sessions``) and from git
histories (``git``). Every session is laid out in five ways:

    psm          PRE prefix SUF suffix MID
    spm          PRE SUF suffix MID prefix
    efim         the cut of a file's first request, moved only when a deletion passes it
    planner      midfill's own, from the texts alone: no file names
    optimum      the cheapest cuts, the whole session known in advance (``offline_optimum``)

again as a client that sends only a window around the caret would lay it out, and by a planner that
shows a window of its own of the whole documents (``infill/window.py``). The cost of a
prompt is its tokens after the longest prefix shared with an earlier prompt (``cost``). Tokens are
those of a stand-in for a model's tokenizer unless one is given.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.layouts import prompts
from benchmarks.layouts.cost import PieceTokenizer, PromptEncoder, Tokenize
from benchmarks.layouts.git import History, git_session
from benchmarks.report import publish
from midfill.cli.progress import show_steps
from midfill.infill.window import DEFAULT_WINDOW, WindowRule
from midfill.models.checkpoints.model_store import resolve
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.documents import standard_library_documents
from midfill_lab.bench.editing import SESSION_KINDS, Round, edit_session
from midfill_lab.bench.edits import efim_cuts, psm_cuts
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

LAYOUTS = ("psm", "spm", "efim", "planner", "optimum")
WINDOWS: Mapping[str, Mapping[str, int]] = {
    "4000 characters": {"characters": 4000},
    "60 lines": {"lines": 60},
}
SHOWN: Mapping[str, WindowRule] = {
    f"{rule.before}/{rule.after}": rule for rule in (WindowRule(2000, 600), DEFAULT_WINDOW)
}
"""The planner's own windows, characters before/after the caret."""
WHOLE = "whole"
_FILES = 3
_LONG_FILE = 100_000


class LayoutsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to replay.

    Attributes:
        mixes: sessions of the editing mix.
        rounds: requests of each of them, and of each repository.
        kind_rounds: requests of each session with one kind of action; 0 leaves them out.
        planned: requests of the long files that planning is timed with.
        repositories: local git repositories to replay as well, as "PATH" or "PATH@COMMIT".
        seed: all chance follows from it.
    """

    mixes: int = 5
    rounds: int = 1000
    kind_rounds: int = 600
    planned: int = 400
    repositories: list[str] = []
    seed: int = 0


QUICK = LayoutsOptions(mixes=3, rounds=400, kind_rounds=200)
"""A choice that takes less than 40 seconds."""


class SessionResult(msgspec.Struct, frozen=True, kw_only=True):
    """One session's figures.

    Attributes:
        name: kind of session, or repository.
        requests: how many.
        characters: mean length of prefix and suffix together.
        tokens_computed: by layout.
        windowed: tokens computed by window and layout: "psm" and "efim" on the windows as sent,
            and "planner".
        shown: tokens computed by the planner with windows of its own, by window.
        moves: tokens that each mere move of the caret computes, with whole documents ("whole") and
            by window of ``shown``.
        most_over_typed: worst request after typing: tokens computed less tokens typed.
        most_for_accepting: worst request after a completion was accepted: tokens computed.
        commit: of a history, the newest commit that was replayed; "" for other sessions.
    """

    name: str
    requests: int
    characters: int
    tokens_computed: dict[str, int]
    windowed: dict[str, dict[str, int]]
    shown: dict[str, int]
    moves: dict[str, list[int]]
    most_over_typed: int
    most_for_accepting: int
    commit: str = ""


class Range(msgspec.Struct, frozen=True):
    """The lowest and the highest of some figures."""

    low: float
    high: float


class PlanningTime(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of processor time to plan one request of a long document.

    Attributes:
        characters: of the documents.
        requests: how many were planned.
        median, p99, worst: over the requests.
    """

    characters: int
    requests: int
    median: float
    p99: float
    worst: float


class LayoutsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call counted.

    Attributes:
        tokens_computed: by layout, over all sessions of the mix.
        windowed: the same sessions as windows, over all of ``WINDOWS``.
        sessions: the mix (all its sessions together), each kind, each history.
        over_histories: the planner's share of each other layout's tokens, lowest and highest
            over the histories; empty without any.
        planning: how long planning takes.
        unit: what a token is.
    """

    tokens_computed: dict[str, int]
    windowed: dict[str, int]
    sessions: list[SessionResult]
    over_histories: dict[str, Range]
    planning: PlanningTime
    unit: str
    options: LayoutsOptions
    machine: Machine


def measure_layouts(
    options: LayoutsOptions | None = None,
    *,
    tokenize: Tokenize | None = None,
    unit: str = "pieces of words, about 3.5 characters each",
    progress: Callable[[str], None] = lambda _: None,
) -> LayoutsReport:
    """Count the tokens of all sessions under all layouts.

    Args:
        options: what to replay.
        tokenize, unit: a model's tokenizer (text to ids, no special tokens) and its name.
        progress: receives what is being replayed.

    Raises:
        HistoryError: a repository can't be read.
    """
    options = options or LayoutsOptions()
    tokenize = tokenize or PieceTokenizer()
    results: dict[str, list[SessionResult]] = {}
    histories = [History.find(named) for named in options.repositories]
    for name, rounds in _sessions(options):
        progress(name)
        results.setdefault(name, []).append(measure(name, rounds, tokenize))
    for history in histories:
        progress(str(history))
        rounds = git_session(history, rounds=options.rounds, seed=options.seed)
        result = measure(f"git: {history.repository.name}", rounds, tokenize)
        pinned = msgspec.structs.replace(result, commit=history.commit)
        results[str(history)] = [pinned]
    sessions = [_together(parts) for parts in results.values()]
    progress(f"planning at {_LONG_FILE:,} characters")
    mix = sessions[0]
    return LayoutsReport(
        tokens_computed=mix.tokens_computed,
        windowed=_total(mix.windowed.values()),
        sessions=sessions,
        over_histories=ranges_over_histories(sessions),
        planning=planning_time(options.planned, options.seed, tokenize),
        unit=unit,
        options=options,
        machine=describe_machine(),
    )


def measure(name: str, rounds: Sequence[Round], tokenize: Tokenize) -> SessionResult:
    """Count one session under all layouts."""
    encode = PromptEncoder(tokenize)
    planned = prompts.plan(rounds, tokenize)
    planner = prompts.count(rounds, planned.prompts, encode)
    efim = efim_cuts(rounds)
    cuts = {
        "psm": psm_cuts(rounds),
        "spm": [0] * len(rounds),
        "efim": efim,
        "optimum": prompts.best_cuts(rounds, [planned.cuts, efim]),
    }
    computed = {"planner": sum(planner)}
    for layout, places in cuts.items():
        laid_out = prompts.cut_prompts(rounds, places)
        computed[layout] = sum(prompts.count(rounds, laid_out, encode))
    shown = {
        name: prompts.count(rounds, prompts.plan(rounds, tokenize, rule).prompts, encode)
        for name, rule in SHOWN.items()
    }
    return SessionResult(
        name=name,
        requests=len(rounds),
        characters=sum(len(edit.prefix) + len(edit.suffix) for edit in rounds) // len(rounds),
        tokens_computed={layout: computed[layout] for layout in LAYOUTS},
        windowed={
            window: _measure_windowed(windowed(rounds, **size), tokenize, encode)
            for window, size in WINDOWS.items()
        },
        shown={window: sum(costs) for window, costs in shown.items()},
        moves={
            window: prompts.costs_of_moves(rounds, costs)
            for window, costs in {WHOLE: planner, **shown}.items()
        },
        most_over_typed=prompts.most_over_typed(rounds, planner, encode),
        most_for_accepting=prompts.most_for_accepting(rounds, planner),
    )


def ranges_over_histories(sessions: Sequence[SessionResult]) -> dict[str, Range]:
    """Return the planner's lowest and highest share of each other layout over all histories."""
    counts = [session.tokens_computed for session in sessions if session.commit]
    ranges = {}
    for layout in LAYOUTS if counts else ():
        if layout != "planner":
            shares = [each["planner"] / each[layout] for each in counts]
            ranges[layout] = Range(min(shares), max(shares))
    return ranges


def planning_time(requests: int, seed: int, tokenize: Tokenize) -> PlanningTime:
    """Measure how long planning takes for long files that are sent whole."""
    texts = standard_library_documents(4 * 10, seed=seed, shortest=8000, longest=30_000)
    sources = {
        f"{number}.py": "".join(texts[10 * number :][:10])[:_LONG_FILE] for number in range(4)
    }
    rounds = edit_session(sources, SESSION_KINDS["mix"], rounds=requests, seed=seed)
    times = sorted(prompts.plan(rounds, tokenize).milliseconds)
    return PlanningTime(
        characters=_LONG_FILE,
        requests=requests,
        median=times[requests // 2],
        p99=times[int(0.99 * requests)],
        worst=times[-1],
    )


def windowed(
    rounds: Sequence[Round], *, characters: int | None = None, lines: int | None = None
) -> list[Round]:
    """Return the same session with only a window around the caret.

    Args:
        characters: how many before and after the caret; or
        lines: how many whole lines before and after the caret's own.
    """
    sent = []
    for edit in rounds:
        prefix, suffix = edit.prefix, edit.suffix
        if characters is not None:
            prefix, suffix = prefix[max(0, len(prefix) - characters) :], suffix[:characters]
        if lines is not None:
            prefix = "\n".join(prefix.split("\n")[-lines - 1 :])
            suffix = "\n".join(suffix.split("\n")[: lines + 1])
        sent.append(replace(edit, prefix=prefix, suffix=suffix))
    return sent


def _measure_windowed(
    rounds: Sequence[Round], tokenize: Tokenize, encode: PromptEncoder
) -> dict[str, int]:
    laid_out = {
        "psm": prompts.cut_prompts(rounds, psm_cuts(rounds)),
        "efim": prompts.cut_prompts(rounds, efim_cuts(rounds)),
        "planner": prompts.plan(rounds, tokenize).prompts,
    }
    return {name: sum(prompts.count(rounds, texts, encode)) for name, texts in laid_out.items()}


def _sessions(options: LayoutsOptions) -> Iterator[tuple[str, list[Round]]]:
    """Yield name and requests of every session of the editing mix, the mix itself first."""
    for number in range(options.mixes):
        yield "mix", mixed_session("mix", options.rounds, options.seed + number)
    if options.kind_rounds:
        for name in SESSION_KINDS:
            if name != "mix":
                yield name, mixed_session(name, options.kind_rounds, options.seed + options.mixes)


def mixed_session(kind: str, rounds: int, seed: int) -> list[Round]:
    """Return a session of one kind over files of the standard library."""
    chance = random.Random(seed)
    texts = standard_library_documents(
        _FILES, seed=chance.randrange(2**32), shortest=4000, longest=24_000
    )
    sources = {f"{number}.py": text for number, text in enumerate(texts)}
    return edit_session(sources, SESSION_KINDS[kind], rounds=rounds, seed=seed)


def _together(parts: Sequence[SessionResult]) -> SessionResult:
    """Return the figures of several sessions as one's."""
    requests = sum(part.requests for part in parts)
    return SessionResult(
        name=parts[0].name,
        requests=requests,
        characters=sum(part.requests * part.characters for part in parts) // requests,
        tokens_computed=_total(part.tokens_computed for part in parts),
        windowed={window: _total(part.windowed[window] for part in parts) for window in WINDOWS},
        shown=_total(part.shown for part in parts),
        moves={
            window: [cost for part in parts for cost in part.moves[window]]
            for window in (WHOLE, *SHOWN)
        },
        most_over_typed=max(part.most_over_typed for part in parts),
        most_for_accepting=max(part.most_for_accepting for part in parts),
        commit=parts[0].commit,
    )


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def layouts_table(report: LayoutsReport) -> ResultTable:
    """Return a row per session."""
    return ResultTable(
        title="Editing sessions: tokens computed, and the planner's share of others'",
        rows=[_cells(result) for result in report.sessions],
        caption=_notes(report),
    )


def _cells(result: SessionResult) -> dict[str, str]:
    computed = result.tokens_computed
    planner = computed["planner"]
    cells = {
        "session": _label(result),
        "requests": f"{result.requests:,}",
        "characters": f"{result.characters:,}",
    }
    cells |= {f"{layout} tokens": f"{computed[layout]:,}" for layout in LAYOUTS}
    for layout in ("optimum", "efim", "psm"):
        cells[f"planner / {layout}"] = f"{planner / computed[layout]:.3f}"
    for window in WINDOWS:
        counts = result.windowed[window]
        share, whole = counts["planner"] / counts["psm"], counts["planner"] / planner
        cells[f"{window}: / psm, / whole"] = f"{share:.3f}, {whole:.2f}"
    for window, tokens in result.shown.items():
        cells[f"shown {window}: / whole"] = f"{tokens / planner:.2f}"
    return cells


def _notes(report: LayoutsReport) -> str:
    planning = report.planning
    return (
        f"{_histories(report)}"
        f"Tokens computed; a token is {report.unit}. Seed {report.options.seed}.\n"
        "At most over what was typed: "
        f"{max(session.most_over_typed for session in report.sessions)} tokens. "
        "At most after accepting a completion: "
        f"{max(session.most_for_accepting for session in report.sessions)} tokens.\n"
        f"{_moves(report.sessions)}"
        f"Planning at {planning.characters:,} characters: median {planning.median:.2f} ms, "
        f"p99 {planning.p99:.2f} ms, worst of {planning.requests} {planning.worst:.2f} ms.\n"
        f"{report.machine}."
    )


def _label(result: SessionResult) -> str:
    return f"{result.name}@{result.commit[:7]}" if result.commit else result.name


def _histories(report: LayoutsReport) -> str:
    """The planner's range over histories, as a line of the notes."""
    ranges = report.over_histories
    if not ranges:
        return ""
    shares = ", ".join(
        f"{ranges[layout].low:.3f} to {ranges[layout].high:.3f} of {layout}"
        for layout in ("optimum", "efim", "psm")
    )
    pinned = [
        _label(session).removeprefix("git: ") for session in report.sessions if session.commit
    ]
    return (
        f"The planner's tokens over {len(pinned)} histories ({', '.join(pinned)}), lowest to "
        f"highest: {shares}.\n"
    )


def _moves(sessions: Sequence[SessionResult]) -> str:
    """What moves of the caret compute over all sessions, as a line of the notes."""
    found = []
    for window in (WHOLE, *SHOWN):
        costs = [cost for session in sessions for cost in session.moves[window]]
        if costs:
            what = "the whole document" if window == WHOLE else window
            found.append(f"{median(costs):.0f} and {max(costs):,} with {what}")
    return f"A caret that moves, median and most tokens: {'; '.join(found)}.\n" if found else ""


def layouts(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sessions: under 40 s.")] = False,
    git: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH[@COMMIT]",
            help="A local git repository whose history, up to HEAD or to that commit, is replayed"
            " too; repeatable.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Count this model's tokens; pieces of words if not set."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all random choices.")] = 0,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Count what editing sessions cost under each prompt layout, without running a model.

    Layouts: psm, spm, efim (a fixed cut), planner (what midfill does), and optimum (the
    cheapest cuts, with the whole session known in advance). Sessions come from an editing mix over
    files of the standard library and from git histories.
    """
    options = msgspec.structs.replace(
        QUICK if quick else LayoutsOptions(), seed=seed, repositories=list(git or ())
    )
    counting: dict[str, Any] = {}
    if model is not None:
        tokenizer = open_checkpoint(resolve(model)).tokenizer
        counting = {"tokenize": tokenizer.encode, "unit": model}
    with show_steps("preparing") as progress:
        report = measure_layouts(options, progress=progress, **counting)
    publish(report, layouts_table(report), section="layouts", json=json, docs=docs)
