"""Confidence: estimators of how sure a model's answers are, fitted and tested on held-out files.

Every caret is asked once, as an editor asks. An answer is right if its first line that has text is
exactly what stood there. Two logistic regressions of that on the answer's features
(``infill/confidence.py``) are fitted for the model. What the tables show of each caret is the
estimate that was fitted on the files of the other half, so nothing is judged by itself; likewise
the threshold. What is noted beside the model is fitted on all of them.

Estimates are compared with two that need no fitting: the probability of the answer's tokens
together, and their geometric mean. With a model behind a URL, its own estimates are measured.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path, PurePath

import numpy as np

from midfill.arrays import Float64Array
from midfill.errors import MidfillError
from midfill.infill.confidence import ConfidenceRule, Estimator
from midfill_lab.evaluation.choice import run_notes, split_in_halves
from midfill_lab.evaluation.conditions import Condition
from midfill_lab.evaluation.evaluate import InfillingReport, LineEvidence
from midfill_lab.evaluation.problems import Task
from midfill_lab.evaluation.report import LEGEND, ReportTables, estimate_cell
from midfill_lab.evaluation.summary import Estimate, estimate_mean, tasks_of
from midfill_lab.reporting import ResultTable

CONFIDENCE_CONDITION = Condition("auto", "planner", healing=True, judged=True)
_COVERAGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
_OF_LANGUAGES = 0.4  # coverage at which languages are compared
_BINS = 10
_RIDGE = 1.0  # of standardised weights: with few carets, none may grow without bound
_FEWEST = 20  # right answers, and wrong ones, that can be fitted
_MAX_STEPS = 50


@dataclass(frozen=True)
class JudgedCaret:
    """One answered caret.

    Attributes:
        task: the kind of the hole.
        language: the file's suffix.
        group: the file.
        evidence: what is known of the answer's first line.
        exact: whether the whole answer is right.
        whole, start: estimates by the first line, and by the first tokens.
        threshold: what the answer is shown from; chosen on other files.
    """

    task: Task
    language: str
    group: str
    evidence: LineEvidence
    exact: bool
    whole: float
    start: float
    threshold: float

    @property
    def joint(self) -> float:
        """The log probability of the line; nothing is less sure than a blank answer."""
        line = self.evidence.line
        return line.joint if line is not None and self.evidence.characters else -math.inf


Sureness = Callable[[JudgedCaret], float]
"""What carets are ranked by, the highest first."""


@dataclass(frozen=True)
class ConfidenceResult:
    """Estimates of all carets of a report.

    Attributes:
        carets: all of them.
        rule: fitted on all of them; None behind a URL.
        threshold: from which on answers should be shown.
        precision: percent of the shown answers that were to be right; None if the threshold was
            given.
        report: what was measured.
    """

    carets: list[JudgedCaret]
    rule: ConfidenceRule | None
    threshold: float
    precision: float | None
    report: InfillingReport

    def tables(self) -> ReportTables:
        """Return tables of the curves, of the languages, and of estimates and what was found."""
        return ReportTables(
            [
                *self._curves(),
                ResultTable(title="By language", rows=list(self._languages())),
                ResultTable(title="Estimated and found", rows=list(self._calibration())),
            ],
            self._caption(),
        )

    def plot(self, path: Path) -> None:
        """Plot the curve, and a reliability diagram; the suffix chooses the format."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4.5), layout="constrained")
        curve, reliability = figure.subplots(1, 2)
        shares = np.arange(1, len(self.carets) + 1) / len(self.carets)
        for name, sureness in self._rankings():
            ranked = sorted(self.carets, key=sureness, reverse=True)
            right = np.cumsum([caret.evidence.right for caret in ranked])
            curve.plot(100 * shares[19:], 100 * (right / (shares * len(ranked)))[19:], label=name)
        curve.set_xlabel("answers shown, percent")
        curve.set_ylabel("of these, first line right, percent")
        curve.set_ylim(0, 100)
        curve.legend()
        for name, sureness in (("first line", _whole), ("first tokens", _start)):
            bins = list(reliability_bins(self._written(), sureness))
            estimates, rates = [mean for mean, _, _ in bins], [rate for _, rate, _ in bins]
            reliability.plot(estimates, rates, "o-", label=name)
        reliability.plot([0, 1], [0, 1], color="grey", linestyle=":")
        reliability.set_xlabel("estimated probability that the first line is right")
        reliability.set_ylabel("share that is right")
        reliability.legend()
        for axes in (curve, reliability):
            axes.grid(alpha=0.3)
        figure.suptitle(self.report.model, fontsize="medium")
        figure.savefig(path, dpi=130)

    def measurement(self) -> dict[str, object]:
        """Return how it was measured, to be noted beside the model; plain values."""
        shown = [caret for caret in self.carets if caret.whole >= caret.threshold]
        return {
            **run_notes(self.report),
            "precision": self.precision,
            "calibration_error": round(calibration_error(self._written(), _whole), 4),
            "shown": round(len(shown) / len(self.carets), 4),
            "right_of_shown": round(float(np.mean([each.evidence.right for each in shown])), 4)
            if shown
            else None,
        }

    def _rankings(self) -> list[tuple[str, Sureness]]:
        found: list[tuple[str, Sureness]] = [("estimate", _whole)]
        if self.rule is not None:
            found += [
                ("estimate, first tokens", _start),
                ("probability", lambda caret: caret.joint),
            ]
        return found

    def _written(self) -> list[JudgedCaret]:
        """Return the carets whose answers have text."""
        return [caret for caret in self.carets if caret.evidence.characters]

    def _curves(self) -> Iterator[ResultTable]:
        for task in tasks_of(self.report):
            carets = [caret for caret in self.carets if caret.task == task]
            title = f"{task}: first lines right among the most confident of {len(carets)}"
            rows = []
            for coverage in _COVERAGES:
                row = {"most confident": f"{100 * coverage:.0f}%"}
                for name, sureness in self._rankings():
                    row[name] = estimate_cell(_right(most_confident(carets, sureness, coverage)))
                rows.append(row)
            yield ResultTable(title=title, rows=rows)

    def _languages(self) -> Iterator[dict[str, str]]:
        languages = sorted({caret.language for caret in self.carets})
        for language in [*languages, "all"]:
            carets = [caret for caret in self.carets if language in (caret.language, "all")]
            shown = [caret for caret in carets if caret.whole >= caret.threshold]
            row = {
                "language": language,
                "carets": str(len(carets)),
                "right": estimate_cell(_right(carets)),
                "of 40%": estimate_cell(_right(most_confident(carets, _whole, _OF_LANGUAGES))),
                "shown": f"{100 * len(shown) / len(carets):.1f}",
            }
            row["of shown, right"] = estimate_cell(_right(shown)) if shown else "-"
            row["exact"] = f"{100 * _mean([each.exact for each in shown]):.1f}" if shown else "-"
            row["characters, all"] = _characters(carets)
            row["characters, shown"] = _characters(shown)
            yield row

    def _calibration(self) -> Iterator[dict[str, str]]:
        for estimate, rate, count in reliability_bins(self._written(), _whole):
            yield {
                "estimated": f"{100 * estimate:.1f}",
                "found": f"{100 * rate:.1f}",
                "answers": str(count),
            }

    def _caption(self) -> str:
        options = self.report.options
        how = (
            "given"
            if self.precision is None
            else f"the least at which {self.precision:g}% of the shown are right"
        )
        return (
            f"Threshold: {self.threshold:g}, {how}. Expected calibration error:"
            f" {calibration_error(self._written(), _whole):.3f} by the first line,"
            f" {calibration_error(self._written(), _start):.3f} by the first tokens. Characters:"
            " those of first lines that are right, per character of all first lines."
            f" {self.report.model}; at most {options.before} characters before and {options.after}"
            f" after the caret, greedy, healed, seed {options.seed}. {LEGEND}"
        )


def judge(
    report: InfillingReport, *, precision: float = 75.0, threshold: float | None = None
) -> ConfidenceResult:
    """Fit estimators on a report's carets, and estimate each by those of the other half.

    Args:
        report: its condition is ``CONFIDENCE_CONDITION``.
        precision: percent of the shown answers whose first line should be right.
        threshold: show answers from this estimate on instead.

    Raises:
        MidfillError: the report has other conditions, a server has no estimates, or too few answers
            are right or wrong.
    """
    if list(report.outcomes) != [CONFIDENCE_CONDITION.name]:
        raise MidfillError("these are not results of 'midfill eval confidence'")
    if any(outcome.evidence is None for outcome in report.outcomes[CONFIDENCE_CONDITION.name]):
        raise MidfillError(
            "there are answers of which nothing says how sure they are: only a midfill server whose"
            " model has estimators does"
        )
    outcomes = report.outcomes[CONFIDENCE_CONDITION.name]
    evidence = [each.evidence for each in outcomes if each.evidence is not None]
    groups = [problem.group for problem in report.problems]
    halves = split_in_halves(groups, report.options.seed)
    is_local = all(each.line is not None for each in evidence if each.characters)
    rules = {half: _fitted(evidence, halves, half) if is_local else None for half in set(halves)}
    estimates = [
        _estimates(each, rules["report" if half == "choice" else "choice"])
        for each, half in zip(evidence, halves, strict=True)
    ]

    def chosen(half: str | None) -> float:
        if threshold is not None:
            return threshold
        own = [place for place, each in enumerate(halves) if half in (each, None)]
        return least_threshold(
            [estimates[place][0] for place in own],
            [evidence[place].right for place in own],
            precision / 100,
        )

    thresholds = {"choice": chosen("report"), "report": chosen("choice")}
    carets = [
        JudgedCaret(
            problem.task,
            PurePath(problem.group).suffix,
            problem.group,
            each,
            bool(outcome.scores.get("exact", 0.0)),
            *estimate,
            thresholds[half],
        )
        for problem, half, outcome, each, estimate in zip(
            report.problems, halves, outcomes, evidence, estimates, strict=True
        )
    ]
    rule = None
    if is_local:
        line, start = (fit(evidence, kind) for kind in ("line", "start"))
        rule = ConfidenceRule(line, start, chosen(None))
    return ConfidenceResult(
        carets, rule, chosen(None), None if threshold is not None else precision, report
    )


def fit(evidence: Sequence[LineEvidence], kind: str) -> Estimator:
    """Fit a logistic regression by Newton's method, with a small penalty on the weights.

    Blank answers are left out: they suggest nothing.

    Args:
        evidence: of answers; their features are known.
        kind: "line" or "start".

    Raises:
        MidfillError: too few are right, or too few wrong.
    """
    rows = [
        (*astuple(features), each.right)
        for each in evidence
        if each.characters and (features := getattr(each, kind)) is not None
    ]
    right = sum(row[-1] for row in rows)
    if min(right, len(rows) - right) < _FEWEST:
        raise MidfillError(
            f"{right} of {len(rows)} answers are right: estimates need at least {_FEWEST} right and"
            f" {_FEWEST} wrong answers on either half of the files; ask more with --limit"
        )
    table = np.array(rows, np.float64)
    values, found = table[:, :-1], table[:, -1]
    mean, scale = values.mean(axis=0), values.std(axis=0) + 1e-9
    design = np.column_stack([np.ones(len(values)), (values - mean) / scale])
    penalty = _RIDGE * np.diag([0.0] + [1.0] * values.shape[1])
    weights: Float64Array = np.zeros(design.shape[1])
    for _ in range(_MAX_STEPS):
        expected = 1.0 / (1.0 + np.exp(-design @ weights))
        gradient = design.T @ (found - expected) - penalty @ weights
        curvature = (design.T * (expected * (1.0 - expected))) @ design + penalty
        step = np.linalg.solve(curvature, gradient)
        weights += step
        if np.abs(step).max() < 1e-9:
            break
    slopes = weights[1:] / scale
    return Estimator(float(weights[0] - slopes @ mean), *map(float, slopes))


def least_threshold(estimates: Sequence[float], right: Sequence[bool], precision: float) -> float:
    """Return the least estimate from which on a share of the answers is right.

    It is rounded up to two digits, and 1 where there is none.
    """
    order = np.argsort(-np.array(estimates), kind="stable")
    rates = np.cumsum(np.array(right, np.float64)[order]) / np.arange(1, len(order) + 1)
    enough = np.flatnonzero(rates >= precision)
    if not len(enough):
        return 1.0
    least = float(estimates[order[enough[-1]]])
    return min(1.0, math.ceil(100 * least - 1e-9) / 100)


def most_confident(
    carets: Sequence[JudgedCaret], sureness: Sureness, coverage: float
) -> list[JudgedCaret]:
    """Return a share of the carets, at least one: those ranked highest."""
    count = max(1, round(coverage * len(carets)))
    return sorted(carets, key=sureness, reverse=True)[:count]


def reliability_bins(
    carets: Sequence[JudgedCaret], sureness: Sureness
) -> Iterator[tuple[float, float, int]]:
    """Yield mean estimate, share that is right, and number of ten equal parts by estimate."""
    ranked = sorted(carets, key=sureness)
    for part in np.array_split(np.arange(len(ranked)), min(_BINS, len(ranked))):
        own = [ranked[place] for place in part]
        rights = [caret.evidence.right for caret in own]
        yield _mean([sureness(caret) for caret in own]), _mean(rights), len(own)


def calibration_error(carets: Sequence[JudgedCaret], sureness: Sureness) -> float:
    """Return the expected calibration error: how far bins' estimates are off, on average.

    Guo et al., "On Calibration of Modern Neural Networks", 2017, equation 3, with bins of equal
    numbers.
    """
    bins = list(reliability_bins(carets, sureness))
    total = sum(count for _, _, count in bins)
    return sum(count * abs(estimate - rate) for estimate, rate, count in bins) / max(total, 1)


def _whole(caret: JudgedCaret) -> float:
    return caret.whole


def _start(caret: JudgedCaret) -> float:
    return caret.start


def _fitted(
    evidence: Sequence[LineEvidence], halves: Sequence[str], half: str
) -> tuple[Estimator, Estimator]:
    own = [each for each, other in zip(evidence, halves, strict=True) if other == half]
    return fit(own, "line"), fit(own, "start")


def _estimates(
    evidence: LineEvidence, rule: tuple[Estimator, Estimator] | None
) -> tuple[float, float]:
    """Return the estimates by the first line and by the first tokens; 0 for a blank answer."""
    if not evidence.characters:
        return 0.0, 0.0
    if rule is None or evidence.line is None or evidence.start is None:
        return evidence.estimate or 0.0, evidence.estimate or 0.0
    return rule[0].probability(evidence.line), rule[1].probability(evidence.start)


def _right(carets: Sequence[JudgedCaret]) -> Estimate:
    rights = [float(caret.evidence.right) for caret in carets]
    return estimate_mean(rights, [caret.group for caret in carets])


def _characters(carets: Sequence[JudgedCaret]) -> str:
    """Return the characters that right lines save, per character of all lines."""
    total = sum(caret.evidence.characters for caret in carets)
    saved = sum(caret.evidence.characters for caret in carets if caret.evidence.right)
    return f"{saved / total:.2f}" if total else "-"


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
