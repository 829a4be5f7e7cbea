"""Jumps and files: prompts whose text is cached elsewhere, under every method in turn.

**Jumps.** A line's rest is missing from a file. The user has asked at two other places of the file
before, half of the time within 2,000 characters, and jumps to the hole. The window and the cut are
the planner's.

**Files.** Two requests have shown some files in an order, each at another document. The third asks
with the same files in another order, so that no prefix of them is cached.

**Typing.** Twenty characters have been typed since the last request, laid out in PSM order, where
all of the suffix moves with each keystroke, and as the planner does it, where it stays.

Each prompt is asked for with every method, and last without, by a tenant of its own; by another one
once it has been computed in full. Methods that compute files apart from each other are measured
with files only, and their tenant has asked the earlier requests with the method, too.
"""

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from benchmarks.reuse.results import FILES, FULL, Asked, ReuseOptions, ReuseReport, Trial
from benchmarks.reuse.session import Measured, ReuseSession
from midfill.errors import MidfillError
from midfill.frontend.prompt import Prompt
from midfill.infill.context_files import ContextFile
from midfill.infill.request import InfillRequest
from midfill.infill.window import WindowRule
from midfill.lab.bench.documents import unseen_documents
from midfill.lab.bench.methods.results import Hole
from midfill.methods.contexts.method import ParallelMethod
from midfill.methods.registry import resolve_method
from midfill.system.machine import describe_machine

_DOCUMENTS = 40
_MAX_TOKENS = 32
_NEAR = 2000  # characters
_TYPED = 20
_SHOWN = WindowRule(800, 250)  # of documents beside other files

Draw = Callable[[Sequence[str], int], list[Hole]]


def measure_reuse(
    model: str,
    options: ReuseOptions,
    *,
    draw_holes: Draw,
    is_exact: Callable[[str, str], bool],
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
    save: Callable[[ReuseReport], None] = lambda _: None,
) -> ReuseReport:
    """Measure methods of reuse.

    Args:
        model: name or path.
        options: what to measure.
        draw_holes: draws so many holes from source files.
        is_exact: whether an answer is what was in a hole.
        threads: that the model runs on; None is one per core.
        progress: called with what is being done.
        save: called with the report so far.

    Raises:
        MidfillError: the model can't be loaded or has no FIM tokens, or an option doesn't fit.
    """
    windows = {name: _window(name) for name in options.windows}
    load = os.getloadavg()[0]
    documents = unseen_documents(_DOCUMENTS, seed=options.seed, shortest=9000, longest=20_000)
    session = ReuseSession(model, threads)
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
        if session.encoder(None).format is None:
            raise MidfillError(f"{model} has no FIM tokens: it can't fill in anything")
        run = _Run(session, options, is_exact)
        holes = draw_holes(documents.texts, max(options.jumps, options.contexts))
        for trial in run.trials(windows, holes, documents.texts):
            trials.append(trial)
            progress(f"{trial.kind}: {trial.name}")
            save(report())
        return report()
    finally:
        session.close()


class _Run:
    """What all trials of a run have in common."""

    def __init__(
        self, session: ReuseSession, options: ReuseOptions, is_exact: Callable[[str, str], bool]
    ) -> None:
        self._session = session
        self._options = options
        self._is_exact = is_exact
        self._tenants = 0
        self._typed_window = _window(options.windows[0]) if options.windows else None

    def trials(
        self, windows: Mapping[str, WindowRule], holes: Sequence[Hole], texts: Sequence[str]
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

    def jumps(self, kind: str, window: WindowRule, holes: Sequence[Hole]) -> Iterator[Trial]:
        """Yield one trial per hole."""
        for hole in holes:
            chance = random.Random(f"{self._options.seed}/{hole.name}")
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

    def files(self, holes: Sequence[Hole], texts: Sequence[str]) -> Iterator[Trial]:
        """Yield one trial per hole, with files before it."""
        for number, hole in enumerate(holes):
            chance = random.Random(f"{self._options.seed}/files/{hole.name}")
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
                    context=tuple(part),
                    tenant=f"{number}/{len(before)}",
                )
                before.append(encoder.infill(request))
            shuffled = files[1::2] + files[::2]
            request = InfillRequest(
                prefix=hole.prefix, suffix=hole.suffix, context=tuple(shuffled), tenant=f"{number}"
            )
            yield self._trial(FILES, hole, before, encoder.infill(request))

    def typing(self, layout: Literal["psm", "auto"], holes: Sequence[Hole]) -> Iterator[Trial]:
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

    def _trial(self, kind: str, hole: Hole, before: Sequence[Prompt], prompt: Prompt) -> Trial:
        tenant = self._prepared(before)
        found: dict[str, Measured] = {}
        for method in (*self._options.methods, FULL):
            if isinstance(resolve_method(method), ParallelMethod):
                if kind == FILES:
                    own = self._prepared(before, method)
                    found[method] = self._session.ask(prompt, method, own, _MAX_TOKENS)
                continue
            found[method] = self._session.ask(prompt, method, tenant, _MAX_TOKENS)
            if method != FULL and not found[method].reused_tokens:
                tenant = self._prepared(before)  # the prompt was computed, and is cached now
        full = found[FULL]
        return Trial(
            kind=kind,
            name=hole.name,
            tokens=len(prompt.token_ids),
            cached=full.cached_tokens,
            asked={method: self._asked(one, full, hole) for method, one in found.items()},
        )

    def _prepared(self, before: Sequence[Prompt], method: str = FULL) -> str:
        """Return a tenant who has asked some prompts."""
        self._tenants += 1
        tenant = f"trial {self._tenants}"
        for prompt in before:
            self._session.ask(prompt, method, tenant, 1)
        return tenant

    def _asked(self, one: Measured, full: Measured, hole: Hole) -> Asked:
        p, q = full.log_probabilities, one.log_probabilities
        return Asked(
            ttft_seconds=one.ttft_seconds,
            row_layers=one.row_layers,
            key_pairs=one.key_pairs,
            reused_tokens=one.reused_tokens,
            divergence=max(float((p.exp() * (p - q)).sum()), 0.0),
            answer=one.answer,
            exact=self._is_exact(one.answer, hole.text),
        )


def _window(name: str) -> WindowRule:
    before, slash, after = name.partition("/")
    if not (slash and before.isdigit() and after.isdigit()):
        raise MidfillError(f"a window is characters before/after, like 2000/600, not {name!r}")
    return WindowRule(int(before), int(after))
