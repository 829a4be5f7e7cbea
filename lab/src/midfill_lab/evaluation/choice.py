"""Choosing one of several conditions that cost more and more.

The holes are split in two, by function or file. On one half a condition is chosen, in one of two
ways. Where less is a risk, it is the cheapest one that is as good as the best: its paired
difference from the best has a 95% interval that does not go below a margin. Where more has to
prove its worth, it is the cheapest one than which no dearer one is better beyond doubt. The other
half shows what that choice is worth on holes it was not made on.
"""

import datetime
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from midfill.errors import MidfillError, OptionError
from midfill.system.machine import describe_machine
from midfill.version import __version__
from midfill_lab.evaluation.evaluate import InfillingReport
from midfill_lab.evaluation.problems import Task
from midfill_lab.evaluation.report import LEGEND, ReportTables, estimate_cell, score_rows
from midfill_lab.evaluation.summary import (
    SCORES,
    Estimate,
    estimate_difference,
    estimate_mean,
    summarise,
    tasks_of,
)
from midfill_lab.reporting import ResultTable

Half = Literal["choice", "report"]


class ChoiceResult(msgspec.Struct, frozen=True):
    """One condition, over half of the holes of all tasks.

    Attributes:
        condition: its name.
        score: its mean score.
        difference: from the condition that is best in the first half, paired by hole.
    """

    condition: str
    score: Estimate
    difference: Estimate


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A condition chosen from several.

    Attributes:
        score: name of the score it was chosen by.
        margin: how much worse than the best it may be, 0 to 1; 0 where more has to prove its worth.
        best, recommended: names of conditions.
        choice: what they were chosen from, the cheapest first.
        report: the same conditions on the other holes.
    """

    score: str
    margin: float
    best: str
    recommended: str
    choice: list[ChoiceResult]
    report: list[ChoiceResult]

    @property
    def on_other_holes(self) -> Estimate:
        """The recommended condition's difference from the best, where it was not chosen."""
        return next(
            result.difference for result in self.report if result.condition == self.recommended
        )


def check_score(name: str) -> None:
    """Check the name of a score before the work.

    Raises:
        MidfillError: there is no such score.
    """
    if name not in SCORES:
        raise OptionError(f"--score {name}: there is no such score, only {', '.join(SCORES)}")


def choose_cheapest(
    report: InfillingReport, conditions: Sequence[str], score: str, margin: float
) -> Choice:
    """Choose the first of a report's conditions that is as good as the best.

    Args:
        report: all holes in all these conditions.
        conditions: their names, the cheapest first.
        score: what to choose by.
        margin: how much worse than the best the choice may be, 0 to 1.

    Raises:
        MidfillError: the report lacks the score, or all its holes are of one function or file.
    """
    choice, other = _halves(report)
    on_choice, on_other = (_scores(half, conditions, score) for half in (choice, other))
    best = max(conditions, key=lambda name: sum(on_choice[name]))  # the cheapest of equals
    results = _results(choice, on_choice, best)
    return Choice(
        score=score,
        margin=margin,
        best=best,
        recommended=next(
            result.condition for result in results if result.difference.low >= -margin
        ),
        choice=results,
        report=_results(other, on_other, best),
    )


def choose_unless_better(report: InfillingReport, conditions: Sequence[str], score: str) -> Choice:
    """Choose the first of a report's conditions than which no later one is better beyond doubt.

    Args:
        report: all holes in all these conditions.
        conditions: their names, the cheapest first.
        score: what to choose by.

    Raises:
        MidfillError: the report lacks the score, or all its holes are of one function or file.
    """
    choice, other = _halves(report)
    on_choice, on_other = (_scores(half, conditions, score) for half in (choice, other))
    groups = [problem.group for problem in choice.problems]
    chosen = conditions[0]
    for name in conditions[1:]:
        if estimate_difference(on_choice[chosen], on_choice[name], groups).low > 0:
            chosen = name
    best = max(conditions, key=lambda name: sum(on_choice[name]))
    return Choice(
        score=score,
        margin=0.0,
        best=best,
        recommended=chosen,
        choice=_results(choice, on_choice, best),
        report=_results(other, on_other, best),
    )


def _halves(report: InfillingReport) -> tuple[InfillingReport, InfillingReport]:
    choice, other = half_of(report, "choice"), half_of(report, "report")
    if not choice.problems or not other.problems:
        raise MidfillError("all holes are of one function or file: there is nothing to choose from")
    return choice, other


def split_in_halves(groups: Sequence[str], seed: int) -> list[Half]:
    """Return the half that each hole is in; holes of a group are in the same one."""
    names = sorted(set(groups))
    random.Random(f"{seed}/halves").shuffle(names)
    chosen = set(names[: len(names) // 2])
    return ["choice" if group in chosen else "report" for group in groups]


def indices_of_half(report: InfillingReport, half: Half) -> list[int]:
    """Return the indices of the holes in one half of a report."""
    halves = split_in_halves([problem.group for problem in report.problems], report.options.seed)
    return [index for index, own in enumerate(halves) if own == half]


def half_of(report: InfillingReport, half: Half) -> InfillingReport:
    """Return a report with one half of its holes."""
    kept = indices_of_half(report, half)
    return msgspec.structs.replace(
        report,
        problems=[report.problems[index] for index in kept],
        outcomes={
            name: [outcomes[index] for index in kept] for name, outcomes in report.outcomes.items()
        },
    )


def _scores(
    report: InfillingReport, conditions: Sequence[str], score: str
) -> dict[str, list[float]]:
    """Return one value per hole and condition."""
    scores = {}
    for name in conditions:
        outcomes = report.outcomes[name]
        if not all(score in outcome.scores for outcome in outcomes):
            known = [each for each in SCORES if all(each in outcome.scores for outcome in outcomes)]
            raise OptionError(
                f"--score {score}: not all of these tasks have it; they have {', '.join(known)}"
            )
        scores[name] = [outcome.scores[score] for outcome in outcomes]
    return scores


def _results(
    report: InfillingReport, scores: Mapping[str, Sequence[float]], best: str
) -> list[ChoiceResult]:
    groups = [problem.group for problem in report.problems]
    return [
        ChoiceResult(
            name,
            estimate_mean(values, groups),
            estimate_difference(scores[best], values, groups),
        )
        for name, values in scores.items()
    ]


Cells = Mapping[str, Mapping[str, str]]
"""Condition -> further cells of its row."""


@dataclass(frozen=True, kw_only=True)
class MeasuredChoice:
    """A choice and the report it was made on: as tables, as a plot, and as a note beside a model.

    Attributes:
        report: all holes.
        choice: what was chosen.
        column: what a condition is, such as "distance".
        axis: label of the plot's axis of conditions.
        caption: what was chosen, why, and how it was measured.
        cells: further cells of each task's table of scores.
        more_tables: shown behind the others.
        notes: noted beside the model in addition; plain values.
    """

    report: InfillingReport
    choice: Choice
    column: str
    axis: str
    caption: str
    cells: Mapping[Task, Cells] = field(default_factory=dict)
    more_tables: Sequence[ResultTable] = ()
    notes: Mapping[str, object] = field(default_factory=dict)

    def tables(self) -> ReportTables:
        """Return tables of the holes that nothing was chosen on, by task, and of the choice."""
        return ReportTables([*self._task_tables(), *self.more_tables], self.caption)

    def _task_tables(self) -> Iterator[ResultTable]:
        other, best = half_of(self.report, "report"), self.choice.best
        for task in tasks_of(other):
            title = f"{task}, {len(indices_of_task(other, task))} holes that nothing was chosen on"
            rows = score_rows(summarise(other, task))
            rows = _named(rows, self.column, self.cells.get(task, {}))
            yield ResultTable(title=title, rows=rows)
            rows = _named(_difference_rows(other, task, best), self.column, {})
            yield ResultTable(title=f"{task}, minus {best}", rows=rows)
        pairs = zip(self.choice.choice, self.choice.report, strict=True)
        rows = [_choice_row(self.column, *pair) for pair in pairs]
        yield ResultTable(title="All tasks", rows=rows)

    def plot(self, path: Path) -> None:
        """Plot the score by condition, on either half; the file's suffix chooses the format."""
        from matplotlib.figure import Figure

        choice = self.choice
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        names = [result.condition for result in choice.choice]
        for label, results in (("chosen from", choice.choice), ("other holes", choice.report)):
            scores = [result.score for result in results]
            values = [100 * score.value for score in scores]
            (line,) = axes.plot(values, marker="o", label=f"{label}, {scores[0].count} holes")
            axes.fill_between(
                range(len(scores)),
                [100 * score.low for score in scores],
                [100 * score.high for score in scores],
                color=line.get_color(),
                alpha=0.15,
            )
        axes.axvline(names.index(choice.recommended), color="grey", linestyle=":")
        axes.set_xticks(range(len(names)), names)
        axes.set_xlabel(self.axis)
        axes.set_ylabel(f"{SCORES[choice.score]}, percent")
        axes.set_title(self.report.model, fontsize="medium")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=130)

    def measurement(self) -> dict[str, object]:
        """Return how the choice was measured, to be noted beside the model; plain values."""
        return {
            **run_notes(self.report),
            "score": self.choice.score,
            "margin": self.choice.margin,
            "best": self.choice.best,
            "minus_best_on_other_holes": {
                result.condition: msgspec.to_builtins(result.difference)
                for result in self.choice.report
            },
            **self.notes,
        }


def cheapest_caption(
    report: InfillingReport, choice: Choice, recommendation: str, cheapest: str, prompts: str
) -> str:
    """Return the caption of a choice by ``choose_cheapest``.

    Args:
        report, choice: what was measured and chosen.
        recommendation: what is recommended, such as "Least increment".
        cheapest: the cheapest that is as good, such as "the least distance".
        prompts: how the prompts were made.
    """
    other = estimate_cell(choice.on_other_holes, signed=True)
    return (
        f"{recommendation}: {choice.recommended}, {cheapest} whose "
        f"{SCORES[choice.score]} is below that of the best, {choice.best}, by at "
        f"most {100 * choice.margin:g} points (lower end of the interval, on "
        f"{choice.choice[0].score.count} holes). On the other {choice.report[0].score.count} holes "
        f"it is at {other} of it. {report.model}; {prompts}, greedy, healed, "
        f"seed {report.options.seed}. {LEGEND}"
    )


def run_notes(report: InfillingReport) -> dict[str, object]:
    """Return what is noted of the run that a choice was made on; plain values."""
    return {
        "made_with": f"midfill {__version__}",
        "date": datetime.date.today().isoformat(),
        "machine": str(describe_machine()),
        "model": report.model,
        "holes": {task: len(indices_of_task(report, task)) for task in tasks_of(report)},
        "seed": report.options.seed,
    }


def indices_of_task(report: InfillingReport, task: Task) -> list[int]:
    """Return the indices of a task's holes."""
    return [index for index, problem in enumerate(report.problems) if problem.task == task]


def _difference_rows(report: InfillingReport, task: Task, best: str) -> list[dict[str, str]]:
    """Return a row for each condition but the best one: its scores minus the best one's."""
    indices = indices_of_task(report, task)
    groups = [report.problems[index].group for index in indices]
    scores = list(next(iter(summarise(report, task).values())))

    def values(condition: str, score: str) -> list[float]:
        return [report.outcomes[condition][index].scores[score] for index in indices]

    minus = {
        name: {
            score: estimate_difference(values(best, score), values(name, score), groups)
            for score in scores
        }
        for name in report.outcomes
        if name != best
    }
    return score_rows(minus, signed=True)


def _choice_row(column: str, chosen: ChoiceResult, other: ChoiceResult) -> dict[str, str]:
    return {
        column: chosen.condition,
        "chosen from": estimate_cell(chosen.score),
        "minus best": estimate_cell(chosen.difference, signed=True),
        "other holes": estimate_cell(other.score),
        "minus the same": estimate_cell(other.difference, signed=True),
    }


def _named(rows: Sequence[dict[str, str]], column: str, cells: Cells) -> list[dict[str, str]]:
    """Return rows of conditions with their first column named for what they are."""
    return [
        {
            column: row["condition"],
            **cells.get(row["condition"], {}),
            **{name: cell for name, cell in row.items() if name != "condition"},
        }
        for row in rows
    ]
