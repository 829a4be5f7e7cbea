"""Empty answers: how often a threshold gives them where something is missing, and where not.

Every caret is asked three times (``engine.sampling.empty_answer`` explains the threshold):

* ``off``: without a threshold;
* ``never``: with 1, so that no answer is empty by rule;
* ``always``: with one next to 0, so that nearly all are, and the probability is measured.

So it is known what any threshold would give: nothing where the probability is above it, and the
second answer elsewhere. One half of the files and functions chooses the threshold: the smallest
that loses at most a given share of the answers where something is missing, that is, makes them
empty though they would have text. The other half shows what it is worth.

Where the right answer is unclear, a caret says nothing about thresholds. Therefore carets where
something is missing are those whose files show it (``carets.shows_gap``), and HumanEval's lines,
which are missing from whole functions with a description.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from midfill.errors import MidfillError
from midfill.infill.formats import FimFormat
from midfill_lab.evaluation.choice import Half, run_notes, split_in_halves
from midfill_lab.evaluation.conditions import Condition, required
from midfill_lab.evaluation.evaluate import InfillingReport, Outcome
from midfill_lab.evaluation.problems import CARET_TASKS, EMPTY_TASKS, Task
from midfill_lab.evaluation.report import LEGEND, ReportTables, estimate_cell
from midfill_lab.evaluation.summary import Estimate, estimate_mean, tasks_of
from midfill_lab.reporting import ResultTable

_OFF, _NEVER, _ALWAYS = "off", "never", "always"
_NEXT_TO_0 = 1e-30
EMPTY_CONDITIONS: tuple[Condition, ...] = (
    Condition(_OFF, "planner", healing=True, empty_threshold=0.0),
    Condition(_NEVER, "planner", healing=True, empty_threshold=1.0),
    Condition(_ALWAYS, "planner", healing=True, empty_threshold=_NEXT_TO_0),
)
_THRESHOLDS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
_QUANTILES = {"p10": 0.1, "median": 0.5, "p90": 0.9}
MIN_THRESHOLD = 0.01
"""No smaller threshold is chosen: there the rule would overrule a model that is sure."""


@dataclass(frozen=True)
class CaretResult:
    """What a model did at one caret.

    Attributes:
        task: the kind of the caret.
        group: the function or file.
        missing: whether something is missing.
        probability: of the empty answer.
        off, never: the answers in these conditions.
    """

    task: Task
    group: str
    missing: bool
    probability: float
    off: Outcome
    never: Outcome

    @property
    def lost_below(self) -> float:
        """The thresholds below it lose the answer; an answer without text can't be lost."""
        return 0.0 if self.never.scores["empty"] else self.probability

    def score(self, name: str, threshold: float) -> float:
        """Return a score with a threshold; 0 is without."""
        if threshold == 0.0:
            return self.off.scores[name]
        if self.probability > threshold:
            return float(name == "empty")  # nothing is ever exact where something is missing
        return self.never.scores[name]


class EmptyRates(msgspec.Struct, frozen=True):
    """The shares of empty answers with one threshold.

    Attributes:
        threshold: the threshold; 0 is none.
        missing, nothing: shares where something, and where nothing is missing.
    """

    threshold: float
    missing: Estimate
    nothing: Estimate


@dataclass(frozen=True)
class EmptyChoice:
    """A threshold, and the carets it is reported on.

    Attributes:
        threshold: the threshold.
        limit: the greatest share of answers where something is missing that it may lose; None if
            it was given and not chosen.
        chosen_on: the carets it was chosen on; none if it was given.
        reported_on: the others.
        report: what was measured.
    """

    threshold: float
    limit: float | None
    chosen_on: list[CaretResult]
    reported_on: list[CaretResult]
    report: InfillingReport

    def tables(self) -> ReportTables:
        """Return tables of each kind of carets, and of what other thresholds give."""
        return ReportTables(list(self._tables()), self._caption())

    def plot(self, path: Path) -> None:
        """Plot the share of empty answers against the threshold; the suffix chooses the format."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        thresholds = np.geomspace(1e-4, 1.0, 200)
        for label, missing, colour in (("something", True, "C3"), ("nothing", False, "C0")):
            for results, style in ((self.reported_on, "-"), (self.chosen_on, ":")):
                found = np.array(
                    [result.probability for result in results if result.missing == missing]
                )
                if len(found):
                    shares = [100 * float(np.mean(found > each)) for each in thresholds]
                    name = f"{label} is missing{', chosen from' if style == ':' else ''}"
                    axes.plot(thresholds, shares, style, color=colour, label=name)
        axes.axvline(self.threshold, color="grey", linestyle=":")
        axes.set_xscale("log")
        axes.set_ylim(0, 100)
        axes.set_xlabel("threshold")
        axes.set_ylabel("probability of an empty answer above it, percent")
        axes.set_title(self.report.model, fontsize="medium")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=130)

    def measurement(self) -> dict[str, object]:
        """Return how the threshold was measured, to be noted beside the model; plain values."""
        options = self.report.options
        found = {
            name: rates(self.reported_on, threshold)
            for name, threshold in (("without", 0.0), ("with", self.threshold))
        }
        return {
            **run_notes(self.report),
            "characters": [options.before, options.after],
            "most_lost": self.limit,
            "separation": round(separation(self.reported_on), 3),
            "empty_on_other_holes": {
                name: {
                    "missing": msgspec.to_builtins(shares.missing),
                    "nothing": msgspec.to_builtins(shares.nothing),
                }
                for name, shares in found.items()
            },
        }

    def _tables(self) -> Iterator[ResultTable]:
        results = self.reported_on
        which = " that nothing was chosen on" if self.chosen_on else ""
        kinds = [
            (str(task), [result for result in results if result.task == task])
            for task in tasks_of(self.report)
        ]
        for title, missing in (("Something is missing", True), ("Nothing is missing", False)):
            own = [(name, part) for name, part in kinds if part and part[0].missing == missing]
            if len(own) > 1:
                own.append(("all", [result for result in results if result.missing == missing]))
            rows = [_kind_row(name, part, self.threshold) for name, part in own]
            count = sum(result.missing == missing for result in results)
            yield ResultTable(title=f"{title}, {count} carets{which}", rows=rows)
        thresholds = sorted({*_THRESHOLDS, self.threshold})
        rows = [self._threshold_row(each) for each in thresholds]
        yield ResultTable(title="Empty answers by threshold", rows=rows)

    def _threshold_row(self, threshold: float) -> dict[str, str]:
        names = {0.0: "off", 1.0: "1 (never empty)", self.threshold: f"{self.threshold:g} (chosen)"}
        if self.limit is None:
            names[self.threshold] = f"{self.threshold:g} (given)"
        row = {"threshold": names.get(threshold, f"{threshold:g}")}
        if self.chosen_on:
            row |= _rate_cells(rates(self.chosen_on, threshold), ", chosen from")
        return row | _rate_cells(rates(self.reported_on, threshold), "")

    def _caption(self) -> str:
        options = self.report.options
        missing = sum(result.missing for result in self.chosen_on)
        how = (
            ""
            if self.limit is None
            else f", the smallest that loses at most {100 * self.limit:g}% of {missing} answers"
            " where something is missing"
        )
        return (
            f"Threshold: {self.threshold:g}{how}. p10, median and p90 are of the probability of an"
            " empty answer; of a caret where something and one where nothing is missing, the second"
            f" has the higher one in {100 * separation(self.reported_on):.1f}% of pairs."
            f" {self.report.model}; at most {options.before} characters before and {options.after}"
            f" after the caret, greedy, healed, seed {options.seed}. {LEGEND}"
        )


def empty_conditions(format: FimFormat | None) -> tuple[Condition, ...]:
    """Return the conditions to ask in.

    Raises:
        MidfillError: the model doesn't see what follows the caret.
    """
    required(format)
    return EMPTY_CONDITIONS


def caret_tasks(humaneval: bool) -> tuple[Task, ...]:
    """Return the kinds of carets to ask."""
    return (*(("single-line",) if humaneval else ()), *CARET_TASKS)


def choose_empty(report: InfillingReport, *, limit: float = 0.04) -> EmptyChoice:
    """Choose the threshold on one half of a report's holes.

    Args:
        report: its conditions are ``EMPTY_CONDITIONS``.
        limit: the greatest share of answers where something is missing that it may lose.

    Raises:
        MidfillError: the report has other conditions, or one half lacks a kind of carets.
    """
    results = caret_results(report)
    halves = split_in_halves([result.group for result in results], report.options.seed)

    def half(name: Half) -> list[CaretResult]:
        return [result for result, own in zip(results, halves, strict=True) if own == name]

    chosen_on, reported_on = half("choice"), half("report")
    for part in (chosen_on, reported_on):
        _check_both(part)
    threshold = smallest_threshold(
        [result.lost_below for result in chosen_on if result.missing], limit
    )
    return EmptyChoice(threshold, limit, chosen_on, reported_on, report)


def given_empty(report: InfillingReport, threshold: float) -> EmptyChoice:
    """Return a given threshold, to be reported on all holes.

    Raises:
        MidfillError: as for ``choose_empty``.
    """
    results = caret_results(report)
    _check_both(results)
    return EmptyChoice(threshold, None, [], results, report)


def smallest_threshold(probabilities: Sequence[float], limit: float) -> float:
    """Return the smallest threshold that at most a share of the probabilities is above.

    It is rounded up to two digits, and at least ``MIN_THRESHOLD``.
    """
    above = math.floor(limit * len(probabilities) + 1e-9)
    if above >= len(probabilities):
        return MIN_THRESHOLD
    found = max(MIN_THRESHOLD, sorted(probabilities, reverse=True)[above])
    unit = 10.0 ** (math.floor(math.log10(found)) - 1)
    return min(1.0, round(math.ceil(found / unit - 1e-9) * unit, 12))


def caret_results(report: InfillingReport) -> list[CaretResult]:
    """Return a report's results by caret.

    Raises:
        MidfillError: the report has other conditions.
    """
    if set(report.outcomes) != {condition.name for condition in EMPTY_CONDITIONS}:
        raise MidfillError("these are not results of 'midfill eval empty'")
    rows = zip(
        report.problems, *(report.outcomes[name] for name in (_OFF, _NEVER, _ALWAYS)), strict=True
    )
    return [
        CaretResult(
            problem.task,
            problem.group,
            problem.task not in EMPTY_TASKS,
            always.empty_probability or 0.0,
            off,
            never,
        )
        for problem, off, never, always in rows
    ]


def rates(results: Sequence[CaretResult], threshold: float) -> EmptyRates:
    """Return the shares of empty answers with a threshold; there are carets of either kind."""
    missing = [result for result in results if result.missing]
    nothing = [result for result in results if not result.missing]
    return EmptyRates(
        threshold, estimate(missing, "empty", threshold), estimate(nothing, "empty", threshold)
    )


def estimate(results: Sequence[CaretResult], score: str, threshold: float) -> Estimate:
    """Return the mean of a score with a threshold."""
    values = [result.score(score, threshold) for result in results]
    return estimate_mean(values, [result.group for result in results])


def separation(results: Sequence[CaretResult]) -> float:
    """Return how often an empty answer is more probable where nothing is missing: AUC, 0 to 1."""
    missing = np.array([result.probability for result in results if result.missing])
    nothing = np.array([[result.probability] for result in results if not result.missing])
    return float(np.mean((nothing > missing) + 0.5 * (nothing == missing)))


def _check_both(results: Sequence[CaretResult]) -> None:
    if len({result.missing for result in results}) < 2:
        raise MidfillError(
            "there are too few carets to choose from: half of the files must have carets where"
            " something is missing and carets where nothing is"
        )


def _kind_row(name: str, results: Sequence[CaretResult], threshold: float) -> dict[str, str]:
    quantiles = np.quantile([result.probability for result in results], list(_QUANTILES.values()))
    row = {
        "caret": name,
        "carets": str(len(results)),
        **{name: f"{value:.2g}" for name, value in zip(_QUANTILES, quantiles, strict=True)},
        "empty, off": estimate_cell(estimate(results, "empty", 0.0)),
        f"empty, {threshold:g}": estimate_cell(estimate(results, "empty", threshold)),
    }
    if results[0].missing:
        row["exact, off"] = estimate_cell(estimate(results, "exact", 0.0))
        row[f"exact, {threshold:g}"] = estimate_cell(estimate(results, "exact", threshold))
    return row


def _rate_cells(found: EmptyRates, which: str) -> dict[str, str]:
    return {
        f"missing{which}": estimate_cell(found.missing),
        f"nothing{which}": estimate_cell(found.nothing),
    }
