"""Choosing how a model takes KV from elsewhere after jumps of the caret, see ``jumps``.

Chosen is the method with the least work whose first lines are right as often as exact ones: the
95% interval of the paired difference doesn't go below a margin. That takes many carets. Where there
are too few, or no method is that good, nothing is taken from elsewhere.
"""

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import msgspec

from midfill.errors import MidfillError
from midfill.models.checkpoints.model_record import REUSE_OFF
from midfill.version import __version__
from midfill_lab.evaluation.jumps import Jump, JumpReport
from midfill_lab.evaluation.report import ReportTables, estimate_cell
from midfill_lab.evaluation.summary import Estimate, estimate_difference, estimate_share
from midfill_lab.reporting import ResultTable

MARGIN = 0.005
LEAST_CARETS = 1000
_CONFIDENCES = (0.1, 0.3, 0.5, 0.7)


class MethodResult(msgspec.Struct, frozen=True, kw_only=True):
    """One method, over the jumps for which any method took KV from elsewhere.

    Attributes:
        method: its specification.
        work: rows times layers, as a share of what exact answers take.
        ttft: time to the first token, as a share of the exact answer's; the median.
        right: first lines that are right.
        difference: the same minus exact, paired by jump.
        gained, lost: shares of first lines that only it has right, and only exact answers.
        same: first lines that are those of exact answers.
        mean_divergence, median_divergence: KL of the first token's distribution from the exact one.
    """

    method: str
    work: float
    ttft: float
    right: Estimate
    difference: Estimate
    gained: float
    lost: float
    same: Estimate
    mean_divergence: float
    median_divergence: float

    def carets_needed(self, margin: float) -> int:
        """Return how many carets can tell that it is within a margin, if it is as good as exact.

        With n carets that are independent, a share d of which has another answer right, the 95%
        interval of a difference of 0 ends 1.96 sqrt(d / n) below it.
        """
        changed = self.gained + self.lost
        return max(LEAST_CARETS, math.ceil(changed * (1.96 / margin) ** 2))


@dataclass(frozen=True, kw_only=True)
class ReuseChoice:
    """What was chosen, from what, and why.

    Attributes:
        report: what was measured.
        carets: for so many jumps KV was taken from elsewhere.
        right: first lines of exact answers that are right.
        results: of the methods, that with the least work first.
        margin: how much worse than exact first lines may be, 0 to 1.
        method: the chosen one's specification; "off" if it is none.
        reason: why, in a line.
    """

    report: JumpReport
    carets: int
    right: Estimate
    results: Sequence[MethodResult]
    margin: float
    method: str
    reason: str

    def tables(self) -> ReportTables:
        """Return the table of all methods."""
        rows = [
            {
                "method": "exact",
                "rows x layers": "1.00",
                "time": "1.00",
                "first line right": estimate_cell(self.right),
                "minus exact, points": "",
                "only it right / only exact": "",
                "carets needed": "",
                "first line as exact": "",
                "KL": "",
                "KL, median": "",
            },
            *(_row(result, self.margin) for result in self.results),
        ]
        title = f"Jumps of the caret, {self.carets} with KV from elsewhere"
        tables = [ResultTable(title=title, rows=rows)]
        if sure := [row for method in self.results for row in self._sure_rows(method.method)]:
            tables.append(ResultTable(title="Unsure answers computed exactly", rows=sure))
        return ReportTables(tables, self._caption())

    def _sure_rows(self, method: str) -> list[dict[str, str]]:
        """Return rows of a method whose unsure answers are computed again, with exact KV."""
        known = [
            (jump.answer(method), jump.exact, jump.group)
            for jump in self.report.jumps
            if jump.answers and jump.answer(method).confidence is not None
        ]
        rows = []
        for least in _CONFIDENCES if known else ():
            sure = [(own.confidence or 0.0) >= least for own, _, _ in known]
            pairs = [
                (own if kept else exact, exact)
                for kept, (own, exact, _) in zip(sure, known, strict=True)
            ]
            again = sum(
                exact.row_layers
                for kept, (_, exact, _) in zip(sure, known, strict=True)
                if not kept
            )
            work = sum(own.row_layers for own, _, _ in known) + again
            groups = [group for _, _, group in known]
            difference = estimate_difference(
                [float(exact.right) for _, exact in pairs], [float(own.right) for own, _ in pairs],
                groups,
            )  # fmt: skip
            rows.append(
                {
                    "method": f"{method} ({len(known)})",
                    "sure from": f"{least:g}",
                    "sure": f"{fmean(sure):.0%}",
                    "rows x layers": f"{work / sum(exact.row_layers for _, exact, _ in known):.2f}",
                    "minus exact, points": estimate_cell(difference, signed=True),
                    "first line as exact": estimate_cell(
                        estimate_share([own.same for own, _ in pairs], groups)
                    ),
                }
            )
        return rows

    def _caption(self) -> str:
        report = self.report
        files = len({jump.group for jump in report.jumps})
        tokens = fmean(jump.tokens for jump in report.jumps)
        new = fmean(jump.tokens - jump.cached for jump in report.jumps)
        return (
            f"Reuse: {self.method}. {self.reason} {report.model}; {len(report.jumps)} jumps in"
            f" {files} files of {report.options.shortest:,} to {report.options.longest:,}"
            f" characters, seed {report.options.seed}; prompts of {tokens:.0f} tokens, {new:.0f} of"
            f" them no cached prefix; for {self.carets} KV was found elsewhere, and the table is of"
            " these. Rows x layers: until the first token, as a share of exact. Time: to the first"
            " token, as a share of the exact answer's, the median. KL: of the first token's"
            " distribution from the exact one, in nats. First lines: percent with 95% intervals"
            " (bootstrap over files, differences paired). Carets needed: for a 95% interval of"
            f" {100 * self.margin:g} points about a difference of none, if as many answers turn"
            " right or wrong and carets are independent. Sure: answers whose first line is right"
            " with at least this probability, as the model estimates; all others are computed a"
            f" second time, exactly, and all of that counts as work. {report.machine}; load"
            f" {report.load:.1f} when it began."
        )

    def measurement(self) -> dict[str, object]:
        """Return how the choice was measured, to be noted beside the model; plain values."""
        report = self.report
        return {
            "made_with": f"midfill {__version__}",
            "date": datetime.date.today().isoformat(),
            "machine": report.machine,
            "model": report.model,
            "jumps": len(report.jumps),
            "carets": self.carets,
            "seed": report.options.seed,
            "margin": self.margin,
            "reason": self.reason,
            "methods": {
                result.method: {
                    "rows_x_layers": round(result.work, 3),
                    "minus_exact": _rounded(result.difference),
                }
                for result in self.results
            },
        }


def choose_reuse(report: JumpReport, *, margin: float = MARGIN) -> ReuseChoice:
    """Choose a method from a report.

    Args:
        report: what was measured.
        margin: how much worse than exact first lines may be, 0 to 1.

    Raises:
        MidfillError: no method took anything from elsewhere.
    """
    counted = [jump for jump in report.jumps if jump.answers]
    if not counted:
        raise MidfillError(
            f"none of the {len(report.jumps)} jumps shows text that is cached elsewhere:"
            " there is nothing to choose from"
        )
    results = sorted(
        (_result(counted, method) for method in report.options.methods),
        key=lambda result: result.work,
    )
    method, reason = _chosen(results, len(counted), margin)
    return ReuseChoice(
        report=report,
        carets=len(counted),
        right=estimate_share(
            [jump.exact.right for jump in counted], [jump.group for jump in counted]
        ),
        results=results,
        margin=margin,
        method=method,
        reason=reason,
    )


def _chosen(results: Sequence[MethodResult], carets: int, margin: float) -> tuple[str, str]:
    """Return the method to take and why."""
    points = f"{100 * margin:g} points"
    if carets < LEAST_CARETS:
        return REUSE_OFF, f"Off: {carets} carets tell too little, it takes {LEAST_CARETS:,}."
    for result in results:
        if result.difference.low > -margin and result.work < 1.0:
            cell = estimate_cell(result.difference, signed=True)
            return result.method, f"The least work within {points} of exact: {cell}."
    best = max(results, key=lambda result: result.difference.low)
    cell = estimate_cell(best.difference, signed=True)
    return REUSE_OFF, f"Off: none is within {points} of exact; the nearest, {best.method}: {cell}."


def _result(jumps: Sequence[Jump], method: str) -> MethodResult:
    groups = [jump.group for jump in jumps]
    own, exact = [jump.answer(method) for jump in jumps], [jump.exact for jump in jumps]
    of_exact, right = ([float(answer.right) for answer in answers] for answers in (exact, own))
    divergences = [answer.divergence for answer in own]
    return MethodResult(
        method=method,
        work=sum(each.row_layers for each in own) / sum(each.row_layers for each in exact),
        ttft=median(
            each.ttft_seconds / other.ttft_seconds for each, other in zip(own, exact, strict=True)
        ),
        right=estimate_share([answer.right for answer in own], groups),
        difference=estimate_difference(of_exact, right, groups),
        gained=fmean(max(a - b, 0.0) for a, b in zip(right, of_exact, strict=True)),
        lost=fmean(max(b - a, 0.0) for a, b in zip(right, of_exact, strict=True)),
        same=estimate_share([answer.same for answer in own], groups),
        mean_divergence=fmean(divergences),
        median_divergence=median(divergences),
    )


def _row(result: MethodResult, margin: float) -> dict[str, str]:
    return {
        "method": result.method,
        "rows x layers": f"{result.work:.2f}",
        "time": f"{result.ttft:.2f}",
        "first line right": estimate_cell(result.right),
        "minus exact, points": estimate_cell(result.difference, signed=True),
        "only it right / only exact": f"{100 * result.gained:.1f} / {100 * result.lost:.1f}",
        "carets needed": f"{result.carets_needed(margin):,}",
        "first line as exact": estimate_cell(result.same),
        "KL": f"{result.mean_divergence:.3f}",
        "KL, median": f"{result.median_divergence:.4f}",
    }


def _rounded(estimate: Estimate) -> dict[str, float]:
    return {name: round(getattr(estimate, name), 4) for name in ("value", "low", "high")}


def read_jumps(path: Path) -> JumpReport:
    """Read a report from JSON.

    Raises:
        MidfillError: the file can't be read or is not a report.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=JumpReport)
    except OSError as error:
        raise MidfillError(f"{path} can't be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise MidfillError(f"{path} is not a report of 'midfill eval reuse': {error}") from None
