"""What ``python -m benchmarks reuse`` has measured, and the tables of it."""

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev

import msgspec

from benchmarks.report import difference_cell
from benchmarks.reuse_contexts import CHANGES, ShownAnswer, shown_row
from benchmarks.reuse_nulls import reuse_nulls
from benchmarks.reuse_scores import score_names
from midfill.system.machine import Machine
from midfill_lab.evaluation.summary import estimate_share
from midfill_lab.reporting import ResultTable

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
        shown: prompts that show known files in each of some ways, as the planner lays them out.
        ways: which of ``CHANGES``.
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
    shown: int = 0
    ways: tuple[str, ...] = tuple(CHANGES)
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
        cached_tokens: prompt tokens whose KV was there, as it would have been computed.
        reused_tokens: further prompt tokens whose KV came from elsewhere.
        divergence: KL of the first token's distribution from that under ``FULL``, in nats.
        answer: its first line.
        exact: whether that is the text that was there.
    """

    ttft_seconds: float
    row_layers: int
    key_pairs: int
    cached_tokens: int
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
        file_tokens: of files that the prompts before have shown, where ``CHANGES`` are measured.
        new_file_tokens: those of them behind the cached prefix.
    """

    kind: str
    name: str
    tokens: int
    cached: int
    asked: dict[str, Asked]
    file_tokens: int = 0
    new_file_tokens: int = 0

    def shown(self, method: str) -> ShownAnswer:
        """Return what came of files that were shown before, under a method."""
        own, full = self.asked[method], self.asked[FULL]
        further = own.cached_tokens - full.cached_tokens  # copied as they are, as APE does
        return ShownAnswer(
            name=self.name,
            files=self.file_tokens,
            again=max(self.new_file_tokens - own.reused_tokens - further, 0),
            row_layers=own.row_layers,
            divergence=own.divergence,
            right=own.exact,
            same=own.answer == full.answer,
        )


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


def reuse_table(report: ReuseReport) -> ResultTable:
    """Return a row per kind of prompt and method."""
    kinds = dict.fromkeys(trial.kind for trial in report.trials if trial.kind not in CHANGES)
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


def shown_table(report: ReuseReport) -> ResultTable:
    """Return a row per way in which known files are shown, and method."""
    rows = []
    for kind in CHANGES:
        trials = [trial for trial in report.trials if trial.kind == kind]
        exact = [trial.shown(FULL) for trial in trials]
        for method in (FULL, *report.options.names):
            if trials and all(method in trial.asked for trial in trials):
                found = [trial.shown(method) for trial in trials]
                rows.append(shown_row(kind, method, found, exact))
    few, many = report.options.files
    least, most = report.options.file_tokens
    return ResultTable(
        title=f"Files shown before: {report.model}",
        rows=rows,
        labels=2,
        caption=f"{report.model}, {report.backend}; places in files of {report.text}. The request"
        f" before has shown {few} to {many} files of {least:,} to {most:,} tokens at another"
        " document; the planner lays both prompts out. File tokens: of those files, in a prompt."
        " Computed again: those behind the cached prefix whose KV isn't copied. Rows x layers:"
        " until the first token, the document's included, as a share of exact. KL: of the first"
        " token's distribution from the exact one, in nats. Right: first lines that are the text"
        f" that was there. {report.machine}; load {report.load:.1f} when it began.",
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
    own, other = (
        [trial.asked[each].divergence for trial in trials] for each in (compared[name], name)
    )
    return {head: difference_cell(own, other, [trial.name for trial in trials], digits=3)}


def _share(some: Sequence[float], whole: Sequence[float]) -> str:
    return f"{sum(some) / sum(whole):.2f}"


def _difference(found: Sequence[Asked], full: Sequence[Asked]) -> str:
    """Return the paired difference in points with its interval; nothing where they are the same."""
    if found == full or len(found) < 2:
        return ""
    points = [100.0 * (a.exact - b.exact) for a, b in zip(found, full, strict=True)]
    reach = 1.96 * stdev(points) / math.sqrt(len(points))
    return f" ({fmean(points):+.1f} ± {reach:.1f})"
