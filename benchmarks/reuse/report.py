"""The table of ``bench reuse``."""

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev

from benchmarks.reuse.results import FULL, Asked, ReuseReport
from midfill.system.reporting.result_table import ResultTable


def reuse_table(report: ReuseReport) -> ResultTable:
    """Return a row per kind of prompt and method."""
    kinds = dict.fromkeys(trial.kind for trial in report.trials)
    rows = [
        _row(report, kind, method)
        for kind in kinds
        for method in (FULL, *report.options.methods)
        if any(trial.kind == kind and method in trial.asked for trial in report.trials)
    ]
    options = report.options
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
        " prompt, and how"
        f" many of them are no cached prefix. {report.machine}; load {report.load:.1f} when it"
        " began.",
    )


def _row(report: ReuseReport, kind: str, method: str) -> dict[str, str]:
    trials = [trial for trial in report.trials if trial.kind == kind]
    found = [trial.asked[method] for trial in trials]
    full = [trial.asked[FULL] for trial in trials]
    divergences = [one.divergence for one in found]
    same = [one.answer == other.answer for one, other in zip(found, full, strict=True)]
    return {
        "prompts": f"{kind} ({len(trials)})",
        "method": method,
        "tokens": f"{fmean(t.tokens for t in trials):,.0f}"
        f" / {fmean(t.tokens - t.cached for t in trials):,.0f}",
        "rows": f"{fmean(one.row_layers for one in found) / report.layers:,.0f}",
        "rows x layers": _share([one.row_layers for one in found], [x.row_layers for x in full]),
        "key pairs": _share([one.key_pairs for one in found], [x.key_pairs for x in full]),
        "time": _share([one.ttft_seconds for one in found], [x.ttft_seconds for x in full]),
        "KL mean": f"{fmean(divergences):.3f}",
        "KL median": f"{median(divergences):.4f}",
        "same": f"{fmean(same):.0%}",
        "right": f"{fmean(one.exact for one in found):.0%}{_difference(found, full)}",
    }


def _share(some: Sequence[float], whole: Sequence[float]) -> str:
    return f"{sum(some) / sum(whole):.2f}"


def _difference(found: Sequence[Asked], full: Sequence[Asked]) -> str:
    """Return the paired difference in points with its interval; nothing where they are the same."""
    if found == full or len(found) < 2:
        return ""
    points = [100.0 * (a.exact - b.exact) for a, b in zip(found, full, strict=True)]
    reach = 1.96 * stdev(points) / math.sqrt(len(points))
    return f" ({fmean(points):+.1f} ± {reach:.1f})"
