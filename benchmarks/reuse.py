"""Jumps and files: prompts whose text is cached elsewhere, under every method in turn.

**Jumps.** A line's rest is missing from a file. The user has asked at two other places of the file
before, half of the time within 2,000 characters, and jumps to the hole. The window and the cut are
the planner's.

**Files.** Two requests have shown some files in an order, each at another document. The third asks
with the same files in another order, so that no prefix of them is cached.

**Typing.** Twenty characters have been typed since the last request, laid out in PSM order, where
all of the suffix moves with each keystroke, and as the planner does it, where it stays.

Each prompt is asked for with every method, and last without, by a tenant of its own; by another one
once it has been computed in full. Nulls compute as many tokens again as CacheBlend does, but at
random, or the first ones, and as many tokens of each file as Cache-Craft does. Other scores choose
as many as CacheBlend: the nearest to the caret, or those that are attended to. Methods that know
files are measured with files only, and their tenant has asked the earlier requests with the method,
too.
"""

import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Annotated, Literal

import msgspec
import numpy as np
import typer

from benchmarks.report import publish
from benchmarks.reuse_nulls import reuse_nulls
from benchmarks.reuse_scores import score_methods, score_names, sentinels_of
from benchmarks.reuse_session import Measured, ReuseSession
from midfill.cli.options import ThreadsOption
from midfill.cli.progress import show_steps
from midfill.errors import MidfillError
from midfill.frontend.prompt import Prompt
from midfill.infill.context_files import ContextFile
from midfill.infill.request import InfillRequest
from midfill.infill.window import WindowRule
from midfill.methods.contexts.method import ParallelMethod
from midfill.methods.registry import methods_of, parse_name, resolve_method
from midfill.methods.reuse.cachecraft import CacheCraft
from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.documents import unseen_documents
from midfill_lab.bench.methods.probes import draw_lines
from midfill_lab.cli.bench.options import JsonOption, LoadedModelOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.evaluation.metrics import is_exact_first_line
from midfill_lab.evaluation.problems import Problem
from midfill_lab.evaluation.summary import estimate_difference, estimate_share
from midfill_lab.reporting import ResultTable, saver

FULL = "none"  # specification under which everything is computed that is no exact prefix
FILES = "files"  # the kind of prompts that show files


class ReuseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        methods: specifications, beside ``FULL``.
        windows: of jumps, characters before and after the caret, as "2000/600".
        jumps: how many per window.
        contexts: prompts with files that were shown before, in another order; as many keystrokes
            are typed in each of two layouts, with the first window.
        files: least and most files of each.
        file_tokens: least and most tokens of a file.
        seed: all chance follows from it.
        nulls: whether methods that choose tokens are compared with their nulls.
        scores: whether CacheBlend is compared with other scores.
    """

    methods: list[str]
    windows: list[str]
    jumps: int = 60
    contexts: int = 12
    files: tuple[int, int] = (3, 6)
    file_tokens: tuple[int, int] = (500, 1500)
    seed: int = 0
    nulls: bool = False
    scores: bool = False

    @property
    def compared(self) -> dict[str, str]:
        """By name of a null or of another score, the method that it is compared with."""
        nulls = reuse_nulls(self.methods) if self.nulls else {}
        scores = score_names(self.methods) if self.scores else {}
        return {name: of for name, (of, _) in nulls.items()} | scores

    @property
    def names(self) -> list[str]:
        """Of the methods, each followed by what is compared with it."""
        compared = self.compared
        return [
            name
            for method in self.methods
            for name in (method, *(other for other, of in compared.items() if of == method))
        ]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What one prompt took under one method, and what came of it.

    Attributes:
        ttft_seconds: until the logits of the first token were there.
        row_layers: rows times layers that were computed until then.
        key_pairs: pairs of a row and a key that it attends to, in all layers together.
        reused_tokens: prompt tokens whose KV came from elsewhere.
        divergence: KL of the first token's distribution from that under ``FULL``, in nats.
        answer: its first line.
        exact: whether that is the text that was there.
    """

    ttft_seconds: float
    row_layers: int
    key_pairs: int
    reused_tokens: int
    divergence: float
    answer: str
    exact: bool


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt under every method.

    Attributes:
        kind: "jump 2000/600", "files", "typing, PSM" or "typing, planner".
        name: of the place in its file.
        tokens: of the prompt.
        cached: how many of them are an exact prefix in the cache.
        asked: by specification.
    """

    kind: str
    name: str
    tokens: int
    cached: int
    asked: dict[str, Asked]


class ReuseReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        layers: of the model.
        load: other work on the machine when it began (the system's load average).
        text: where the files come from.
    """

    model: str
    backend: str
    layers: int
    machine: Machine
    load: float
    text: str
    options: ReuseOptions
    trials: list[Trial]


_DOCUMENTS = 40
_MAX_TOKENS = 32
_NEAR = 2000  # characters
_TYPED = 20
_SHOWN = WindowRule(800, 250)  # of documents beside other files


def measure_reuse(
    model: str,
    options: ReuseOptions,
    *,
    draw: Callable[[Sequence[str], int], list[Problem]] = draw_lines,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
    save: Callable[[ReuseReport], None] = lambda _: None,
) -> ReuseReport:
    """Measure methods of reuse.

    Args:
        model: name or path.
        options: what to measure.
        draw: draws so many holes from source files.
        threads: that the model runs on; None is one per core.
        progress: called with what is being done.
        save: called with the report so far.

    Raises:
        MidfillError: the model can't be loaded or has no FIM tokens, or an option doesn't fit.
    """
    windows = {name: _window(name) for name in options.windows}
    load = os.getloadavg()[0]
    documents = unseen_documents(_DOCUMENTS, seed=options.seed, shortest=9000, longest=20_000)
    nulls = reuse_nulls(options.methods) if options.nulls else {}
    session = ReuseSession(model, threads, {name: null for name, (_, null) in nulls.items()})
    trials: list[Trial] = []

    def report() -> ReuseReport:
        return ReuseReport(
            model=model,
            backend=session.info.backend,
            layers=session.info.layers,
            machine=describe_machine(),
            load=load,
            text=documents.source,
            options=options,
            trials=trials,
        )

    try:
        if session.format is None:
            raise MidfillError(f"{model} has no FIM tokens: it can't fill in anything")
        if options.scores:
            session.add_methods(score_methods(options.methods, sentinels_of(session.format)))
        run = _Run(session, options)
        holes = draw(documents.texts, max(options.jumps, options.contexts))
        for trial in run.trials(windows, holes, documents.texts):
            trials.append(trial)
            progress(f"{trial.kind}: {trial.name}")
            save(report())
        return report()
    finally:
        session.close()


class _Run:
    """What all trials of a run have in common."""

    def __init__(self, session: ReuseSession, options: ReuseOptions) -> None:
        self._session = session
        self._options = options
        self._tenants = 0
        self._typed_window = _window(options.windows[0]) if options.windows else None

    def trials(
        self, windows: Mapping[str, WindowRule], holes: Sequence[Problem], texts: Sequence[str]
    ) -> Iterator[Trial]:
        """Yield all trials: jumps in each window, prompts with files, and what is typed.

        Args:
            windows: of jumps, by name; nothing is typed without any.
            holes: to ask.
            texts: that files are drawn from.
        """
        jumps, contexts = holes[: self._options.jumps], holes[: self._options.contexts]
        for name, window in windows.items():
            yield from self.jumps(f"jump {name}", window, jumps)
        yield from self.files(contexts, texts)
        if windows:
            yield from self.typing("psm", contexts)
            yield from self.typing("auto", contexts)

    def jumps(self, kind: str, window: WindowRule, holes: Sequence[Problem]) -> Iterator[Trial]:
        """Yield one trial per hole."""
        for hole in holes:
            chance = random.Random(f"{self._options.seed}/{hole.id}")
            encoder = self._session.encoder(window)
            text, caret = hole.prefix + hole.suffix, len(hole.prefix)
            before = []
            for _ in range(2):
                reach = _NEAR if chance.random() < 0.5 else len(text)
                place = chance.randint(max(0, caret - reach), min(len(text), caret + reach))
                end = text.find("\n", place)
                at = end if end >= 0 else len(text)
                before.append(encoder.infill(InfillRequest(prefix=text[:at], suffix=text[at:])))
            prompt = encoder.infill(InfillRequest(prefix=hole.prefix, suffix=hole.suffix))
            yield self._trial(kind, hole, before, prompt)

    def files(self, holes: Sequence[Problem], texts: Sequence[str]) -> Iterator[Trial]:
        """Yield one trial per hole, with files before it."""
        for number, hole in enumerate(holes):
            chance = random.Random(f"{self._options.seed}/files/{hole.id}")
            encoder = self._session.encoder(_SHOWN)
            # Planned for tenants of their own: the planner would keep one tenant's files in order.
            others = [text for text in texts if text[:40] not in hole.prefix[:40]]
            files = self._draw_files(others, chance)
            before: list[Prompt] = []
            for part in (files, files[::-1]):
                other = others[(number * 7 + len(before)) % len(others)]
                half = len(other) // 2
                request = InfillRequest(
                    prefix=other[:half],
                    suffix=other[half:],
                    context_files=tuple(part),
                    tenant=f"{number}/{len(before)}",
                )
                before.append(encoder.infill(request))
            shuffled = files[1::2] + files[::2]
            request = InfillRequest(
                prefix=hole.prefix,
                suffix=hole.suffix,
                context_files=tuple(shuffled),
                tenant=f"{number}",
            )
            yield self._trial(FILES, hole, before, encoder.infill(request))

    def typing(self, layout: Literal["psm", "auto"], holes: Sequence[Problem]) -> Iterator[Trial]:
        """Yield one trial per hole."""
        kind = "typing, PSM" if layout == "psm" else "typing, planner"
        for hole in holes:
            encoder = self._session.encoder(self._typed_window)
            before, now = (
                encoder.infill(
                    InfillRequest(prefix=prefix, suffix=hole.suffix, layout=layout, document="d")
                )
                for prefix in (hole.prefix[:-_TYPED], hole.prefix)
            )
            yield self._trial(kind, hole, [before], now)

    def _draw_files(self, texts: Sequence[str], chance: random.Random) -> list[ContextFile]:
        tokenizer, options = self._session.tokenizer, self._options
        files = []
        for number, text in enumerate(chance.sample(texts, chance.randint(*options.files))):
            ids = tokenizer.encode(text)[: chance.randint(*options.file_tokens)]
            lines = tokenizer.decode(ids).rpartition("\n")[0] + "\n"
            files.append(ContextFile(text=lines, path=f"part{number}.py"))
        return files

    def _trial(self, kind: str, hole: Problem, before: Sequence[Prompt], prompt: Prompt) -> Trial:
        tenant = self._prepared(before)
        found: dict[str, Measured] = {}
        compared = self._options.compared
        for method in (*self._options.names, FULL):
            own = found.get(compared.get(method, ""))
            if own is not None and not own.reused_tokens:
                found[method] = own  # there is nothing to choose from
                continue
            if isinstance(self._session.find_method(method), ParallelMethod | CacheCraft):
                if kind == FILES:
                    knowing = self._prepared(before, method)
                    found[method] = self._session.ask(prompt, method, knowing, _MAX_TOKENS)
                continue
            found[method] = self._session.ask(prompt, method, tenant, _MAX_TOKENS)
            if method != FULL and not found[method].reused_tokens:
                tenant = self._prepared(before)  # the prompt was computed, and is cached now
        full = found[FULL]
        return Trial(
            kind=kind,
            name=hole.id,
            tokens=len(prompt.token_ids),
            cached=full.cached_tokens,
            asked={method: self._asked(measured, full, hole) for method, measured in found.items()},
        )

    def _prepared(self, before: Sequence[Prompt], method: str = FULL) -> str:
        """Return a tenant who has asked some prompts."""
        self._tenants += 1
        tenant = f"trial {self._tenants}"
        for prompt in before:
            self._session.ask(prompt, method, tenant, 1)
        return tenant

    def _asked(self, measured: Measured, full: Measured, hole: Problem) -> Asked:
        p, q = full.log_probabilities, measured.log_probabilities
        return Asked(
            ttft_seconds=measured.ttft_seconds,
            row_layers=measured.row_layers,
            key_pairs=measured.key_pairs,
            reused_tokens=measured.reused_tokens,
            divergence=max(float((np.exp(p) * (p - q)).sum()), 0.0),
            answer=measured.answer,
            exact=is_exact_first_line(measured.answer, hole.hole),
        )


def _window(name: str) -> WindowRule:
    before, slash, after = name.partition("/")
    if not (slash and before.isdigit() and after.isdigit()):
        raise MidfillError(f"a window is characters before/after, like 2000/600, not {name!r}")
    return WindowRule(int(before), int(after))


def reuse_table(report: ReuseReport) -> ResultTable:
    """Return a row per kind of prompt and method."""
    kinds = dict.fromkeys(trial.kind for trial in report.trials)
    rows = [
        _row(report, kind, method)
        for kind in kinds
        for method in (FULL, *report.options.names)
        if any(trial.kind == kind and method in trial.asked for trial in report.trials)
    ]
    options = report.options
    nulls = (
        " Random and first tokens: as many are computed again as under the method above; their KL"
        " minus the method's on the same prompts, with its 95% interval."
        if options.nulls
        else ""
    )
    if options.scores:
        nulls += (
            " Nearest: as many tokens as under the method above, those nearest to the caret."
            " Attention: those that the last tokens before the answer attend to most in the check"
            " layer; deviation x attention: its product with CacheBlend's own score."
        )
    few, many = options.files
    least, most = options.file_tokens
    return ResultTable(
        title=f"KV from elsewhere: {report.model}",
        rows=rows,
        labels=2,
        caption=f"{report.model}, {report.backend}; places in files of {report.text}. Jumps: the"
        " third request of a file, by the window around its caret. Files: the third request with"
        f" {few} to {many} files of {least:,} to {most:,} tokens, in another order than before."
        " Typing: twenty characters after the request before. Work: until the first token, of all"
        " prompts together, as a share of what they take without a method: rows times layers, pairs"
        " of rows and keys, and time; rows: as many through all layers would be the same work. KL:"
        " of the first token's distribution from the exact one, in nats. Same: answers whose first"
        " line is that of the exact one. Right: answers whose first line is the text that was"
        " there, and in brackets the difference in points with its 95% interval. Tokens: of a"
        f" prompt, and how many of them are no cached prefix.{nulls} {report.machine}; load"
        f" {report.load:.1f} when it began.",
    )


def _row(report: ReuseReport, kind: str, method: str) -> dict[str, str]:
    trials = [trial for trial in report.trials if trial.kind == kind]
    found = [trial.asked[method] for trial in trials]
    full = [trial.asked[FULL] for trial in trials]
    divergences = [own.divergence for own in found]
    same = [own.answer == other.answer for own, other in zip(found, full, strict=True)]
    return {
        "prompts": f"{kind} ({len(trials)})",
        "method": method,
        "tokens": f"{fmean(t.tokens for t in trials):,.0f}"
        f" / {fmean(t.tokens - t.cached for t in trials):,.0f}",
        "rows": f"{fmean(own.row_layers for own in found) / report.layers:,.0f}",
        "rows x layers": _share([own.row_layers for own in found], [x.row_layers for x in full]),
        "key pairs": _share([own.key_pairs for own in found], [x.key_pairs for x in full]),
        "time": _share([own.ttft_seconds for own in found], [x.ttft_seconds for x in full]),
        "KL mean": f"{fmean(divergences):.3f}",
        "KL median": f"{median(divergences):.4f}",
        **_null_cells(report, trials, method),
        "same": f"{fmean(same):.0%}" + _same_interval(report, same, trials),
        "right": f"{fmean(own.exact for own in found):.0%}{_difference(found, full)}",
    }


def _same_interval(report: ReuseReport, same: Sequence[bool], trials: Sequence[Trial]) -> str:
    """Return the 95% interval of a share, where scores are compared by it."""
    if not report.options.scores:
        return ""
    found = estimate_share(same, [trial.name for trial in trials])
    return f" [{found.low:.0%}, {found.high:.0%}]"


def _null_cells(report: ReuseReport, trials: Sequence[Trial], name: str) -> dict[str, str]:
    """Return how much larger a null's or score's divergence is than its method's, if any is."""
    compared = report.options.compared
    if not compared:
        return {}
    head = "KL minus the method's"
    if name not in compared:
        return {head: ""}
    found = estimate_difference(
        [trial.asked[compared[name]].divergence for trial in trials],
        [trial.asked[name].divergence for trial in trials],
        [trial.name for trial in trials],
    )
    return {head: f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"}


def _share(some: Sequence[float], whole: Sequence[float]) -> str:
    return f"{sum(some) / sum(whole):.2f}"


def _difference(found: Sequence[Asked], full: Sequence[Asked]) -> str:
    """Return the paired difference in points with its interval; nothing where they are the same."""
    if found == full or len(found) < 2:
        return ""
    points = [100.0 * (a.exact - b.exact) for a, b in zip(found, full, strict=True)]
    reach = 1.96 * stdev(points) / math.sqrt(len(points))
    return f" ({fmean(points):+.1f} ± {reach:.1f})"


_METHODS = (
    "cacheblend:ratio=0 cacheblend:ratio=0.15 cacheblend:ratio=0.3 ape:temperature=1,scale=1 ape"
)


MethodsOption = Annotated[
    str, typer.Option(help="Methods with their options, separated by blanks.")
]
WindowsOption = Annotated[
    str,
    typer.Option(help="Windows of jumps, characters before/after the caret, by commas."),
]
JumpsOption = Annotated[int, typer.Option(min=0, help="Jumps of the caret per window.")]
ContextsOption = Annotated[
    int, typer.Option(min=0, help="Prompts with files that were shown before.")
]
NullsOption = Annotated[
    bool,
    typer.Option(
        "--nulls", help="Also compute as many tokens again at random, and as many of the first."
    ),
]
ScoresOption = Annotated[
    bool,
    typer.Option(
        "--scores",
        help="Also compute as many tokens again nearest to the caret, and by attention.",
    ),
]
SeedOption = Annotated[int, typer.Option(help="All chance follows from it.")]


def reuse(
    model: LoadedModelOption = None,
    methods: MethodsOption = _METHODS,
    windows: WindowsOption = "2000/600,6000/1500",
    jumps: JumpsOption = 60,
    contexts: ContextsOption = 12,
    seed: SeedOption = 0,
    nulls: NullsOption = False,
    scores: ScoresOption = False,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure methods that take KV from elsewhere: jumps of the caret, files shown before.

    Counted work and time to the first token, and how far its distribution and the answers are from
    the exact ones. Without jumps, only prompts with files are measured, for a section of their own.
    """
    chosen = methods.split()
    for specification in chosen:
        resolve_method(specification)
        if parse_name(specification) not in methods_of("reuse"):
            *others, last = methods_of("reuse")
            raise MidfillError(
                f"{specification} takes no KV from elsewhere, as {', '.join(others)} and {last} do"
            )
    if not jumps and not contexts:
        raise MidfillError("there is nothing to measure: --jumps or --contexts must be above 0")
    options = ReuseOptions(
        methods=chosen,
        windows=[name.strip() for name in windows.split(",")] if jumps else [],
        jumps=jumps,
        contexts=contexts,
        seed=seed,
        nulls=nulls,
        scores=scores,
    )

    with show_steps("loading") as progress:
        report = measure_reuse(
            model or DEFAULT_MODEL,
            options,
            threads=threads,
            progress=progress,
            save=saver(json),
        )
    section = "reuse" if jumps else "reuse-files"
    publish(report, reuse_table(report), section=section, json=json, docs=docs)
