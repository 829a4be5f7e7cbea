"""Jumps and files: prompts whose text is cached elsewhere, under every method in turn.

**Jumps.** A line's rest is missing from a file. The user has asked at two other places of the file
before, half of the time within 2,000 characters, and jumps to the hole. The window and the cut are
the planner's.

**Files.** Two requests have shown some files in an order, each at another document. The third asks
with the same files in another order, so that no prefix of them is cached.

**Files shown before**, as the planner lays them out: see ``reuse_contexts``.

**Typing.** Twenty characters have been typed since the last request, laid out in PSM order, where
all of the suffix moves with each keystroke, and as the planner does it, where it stays.

Each prompt is asked for with every method, and last without, by a tenant of its own; by another one
once it has been computed in full. Nulls compute as many tokens again as CacheBlend does, but at
random, or the first ones, and as many tokens of each file as Cache-Craft does. Other scores choose
as many as CacheBlend: the nearest to the caret, or those that are attended to. Methods that know
files are measured with files only, and their tenant has asked the earlier requests with the method,
too.
"""

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
import typer

from benchmarks.report import publish
from benchmarks.reuse_contexts import CHANGES, count_known, parse_ways
from benchmarks.reuse_nulls import reuse_nulls
from benchmarks.reuse_report import (
    FILES,
    FULL,
    Asked,
    ReuseOptions,
    ReuseReport,
    Trial,
    reuse_table,
    shown_table,
)
from benchmarks.reuse_scores import score_methods
from midfill.cli.options import ThreadsOption
from midfill.cli.progress import show_steps
from midfill.errors import MidfillError
from midfill.frontend.prompt import Prompt
from midfill.infill.context_files import ContextFile
from midfill.infill.request import InfillRequest
from midfill.infill.window import WindowRule
from midfill.methods.contexts.method import ParallelMethod
from midfill.methods.reuse.cachecraft import CacheCraft
from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from midfill.system.machine import describe_machine
from midfill_lab.bench.documents import unseen_documents
from midfill_lab.bench.methods.probes import draw_lines
from midfill_lab.cli.bench.options import JsonOption, LoadedModelOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.evaluation.conditions import required
from midfill_lab.evaluation.jumps import parse_reuse_methods
from midfill_lab.evaluation.metrics import is_exact_first_line
from midfill_lab.evaluation.models import ModelChoice
from midfill_lab.evaluation.problems import Problem
from midfill_lab.evaluation.reuse_session import Measured, ReuseSession
from midfill_lab.reporting import saver

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
    extra = {name: null for name, (_, null) in nulls.items()}
    if options.scores:
        extra |= score_methods(options.methods)
    session = ReuseSession(ModelChoice(model=model, threads=threads), extra)
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
        required(session.format)
        run = _Run(session, options)
        holes = draw(documents.texts, max(options.jumps, options.contexts, options.shown))
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
        yield from self.shown(holes[: self._options.shown], texts)
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

    def shown(self, holes: Sequence[Problem], texts: Sequence[str]) -> Iterator[Trial]:
        """Yield one trial per hole and way."""
        for number, hole in enumerate(holes):
            for kind in self._options.ways:
                chance = random.Random(f"{self._options.seed}/shown/{hole.id}")
                encoder = self._session.encoder(_SHOWN)
                others = [text for text in texts if text[:40] not in hole.prefix[:40]]
                other, *files = self._draw_files(others, chance, 1)
                text = others[number * 7 % len(others)]
                half = len(text) // 2
                first, second = (
                    encoder.infill(
                        InfillRequest(prefix=prefix, suffix=suffix, context_files=tuple(shown))
                    )
                    for prefix, suffix, shown in (
                        (text[:half], text[half:], files),
                        (hole.prefix, hole.suffix, CHANGES[kind](files, other, chance)),
                    )
                )
                trial = self._trial(kind, hole, [first], second)
                known = count_known(first, second, trial.cached)
                yield msgspec.structs.replace(
                    trial, file_tokens=known.shown, new_file_tokens=known.new
                )

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

    def _draw_files(
        self, texts: Sequence[str], chance: random.Random, more: int = 0
    ) -> list[ContextFile]:
        tokenizer, options = self._session.tokenizer, self._options
        files = []
        for number, text in enumerate(chance.sample(texts, chance.randint(*options.files) + more)):
            ids = tokenizer.encode(text)[: chance.randint(*options.file_tokens)]
            lines = tokenizer.decode(ids).rpartition("\n")[0] + "\n"
            files.append(ContextFile(text=lines, path=f"part{number}.py"))
        return files

    def _trial(self, kind: str, hole: Problem, before: Sequence[Prompt], prompt: Prompt) -> Trial:
        tenant = self._session.tenant_who_asked(before)
        found: dict[str, Measured] = {}
        compared = self._options.compared
        for method in (*self._options.names, FULL):
            own = found.get(compared.get(method, ""))
            if own is not None and not own.reused_tokens:
                found[method] = own  # there is nothing to choose from
                continue
            if isinstance(self._session.find_method(method), ParallelMethod | CacheCraft):
                if kind == FILES or kind in CHANGES:
                    knowing = self._session.tenant_who_asked(before, method)
                    found[method] = self._session.ask(prompt, method, knowing, _MAX_TOKENS)
                continue
            found[method] = self._session.ask(prompt, method, tenant, _MAX_TOKENS)
            if method != FULL and not found[method].reused_tokens:
                tenant = self._session.tenant_who_asked(
                    before
                )  # the prompt was computed, and is cached now
        full = found[FULL]
        return Trial(
            kind=kind,
            name=hole.id,
            tokens=len(prompt.token_ids),
            cached=full.cached_tokens,
            asked={method: self._asked(measured, full, hole) for method, measured in found.items()},
        )

    def _asked(self, measured: Measured, full: Measured, hole: Problem) -> Asked:
        p, q = full.log_probabilities, measured.log_probabilities
        return Asked(
            ttft_seconds=measured.ttft_seconds,
            row_layers=measured.row_layers,
            key_pairs=measured.key_pairs,
            cached_tokens=measured.cached_tokens,
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
ShownOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="Prompts with files that the request before has shown, in each of some ways, as the"
        " planner lays them out.",
    ),
]
WaysOption = Annotated[str, typer.Option(help="These ways, separated by commas.")]
FilesOption = Annotated[
    str, typer.Option(metavar="LEAST,MOST", help="Files of a prompt that shows some.")
]
FileTokensOption = Annotated[str, typer.Option(metavar="LEAST,MOST", help="Tokens of such a file.")]
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
    shown: ShownOption = 0,
    ways: WaysOption = "again,reordered,beside,edited",
    files: FilesOption = "3,6",
    file_tokens: FileTokensOption = "500,1500",
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
    chosen = list(parse_reuse_methods(methods))
    if not jumps and not contexts and not shown:
        raise MidfillError(
            "there is nothing to measure: --jumps, --contexts or --shown must be above 0"
        )
    options = ReuseOptions(
        methods=chosen,
        windows=[name.strip() for name in windows.split(",")] if jumps else [],
        jumps=jumps,
        contexts=contexts,
        shown=shown,
        ways=parse_ways(ways),
        files=_bounds("--files", files),
        file_tokens=_bounds("--file-tokens", file_tokens),
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
    if jumps or contexts:
        section = "reuse" if jumps else "reuse-files"
        publish(report, reuse_table(report), section=section, json=json, docs=docs)
    if shown:
        publish(report, shown_table(report), section="reuse-shown", json=json, docs=docs)


def _bounds(option: str, text: str) -> tuple[int, int]:
    least, comma, most = text.partition(",")
    if not (comma and least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most)):
        raise MidfillError(f"{option} takes two numbers, the least and the most, not {text!r}")
    return int(least), int(most)
