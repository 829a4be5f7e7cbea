"""The tables of a run: what full KV answers, and what each method loses in each mode."""

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from midfill_lab.bench.methods.results import FULL, Variant
from midfill_lab.bench.scbench.estimates import Estimate, Value, estimate
from midfill_lab.bench.scbench.results import MODES, Mode, Reuse, Row, SCBenchReport
from midfill_lab.bench.scbench.tasks import TASKS
from midfill_lab.reporting import ResultTable

_NOTHING = "-"


class Condition(NamedTuple):
    """Which questions are put together.

    Attributes:
        title: of their column.
        mode, reuse: see ``results``.
        turns: which of the conversation.
    """

    title: str
    mode: Mode
    reuse: Reuse
    turns: slice = slice(None)

    def holds(self, row: Row) -> bool:
        """Return whether a row of a method belongs to them."""
        turns = range(row.turn + 1)[self.turns]
        return row.mode == self.mode and row.reuse == self.reuse and row.turn in turns


CONDITIONS = (
    Condition("turn 1", "turns", "anew", slice(1)),
    Condition("later turns, held", "turns", "held", slice(1, None)),
    Condition("later turns, anew", "turns", "anew", slice(1, None)),
    Condition("requests, held", "requests", "held"),
    Condition("requests, anew", "requests", "anew"),
)
"""A first turn is the same whatever later ones find."""


class Measure(NamedTuple):
    """What is compared with full KV.

    Attributes:
        title: of the table.
        caption: what a cell is.
        value: of a method's row and full KV's to the same question; None where there is none.
        shown: the cell's text.
        unit: see ``estimates.estimate``.
        answered: whether only the tasks count that full KV answers.
    """

    title: str
    caption: str
    value: Callable[[Row, Row], float | None]
    shown: Callable[[Estimate], str]
    unit: float | None = None
    answered: bool = False


def _nats(found: Estimate) -> str:
    reach = "" if found.reach is None else f" ± {found.reach:.3f}"
    return f"{found.mean:+.3f}{reach}"


def _points(found: Estimate) -> str:
    reach = "" if found.reach is None else f" ± {100 * found.reach:.1f}"
    return f"{100 * found.mean:+.1f}{reach}"


def _logprob_change(row: Row, full: Row) -> float | None:
    if row.logprob is None or full.logprob is None:
        return None
    return row.logprob - full.logprob


LOGPROB = Measure(
    "Log-probability of the right answer",
    "Change from full KV, in nats per token of the right answer; all tasks.",
    _logprob_change,
    _nats,
)
SCORE = Measure(
    "Score",
    "Change from full KV, in points; only tasks that full KV answers.",
    lambda row, full: row.score - full.score,
    _points,
    unit=1.0,
    answered=True,
)
DIVERGENCE = Measure(
    "Divergence",
    "Kullback-Leibler divergence from full KV's distributions, in nats per token of the right"
    " answer; all tasks.",
    lambda row, _: row.divergence,
    _nats,
)
AGREEMENT = Measure(
    "Other answers",
    "Greedy answers that are not full KV's to the letter, in points; all tasks.",
    lambda row, _: 1.0 - row.same,
    _points,
    unit=1.0,
)
MEASURES = (LOGPROB, SCORE, DIVERGENCE, AGREEMENT)


class LengthResults:
    """A report's rows of one length.

    Attributes:
        report: all of it.
        length: tokens.
        answered: tasks in which full KV is shown to be better than a guess.
    """

    def __init__(self, report: SCBenchReport, length: int) -> None:
        self.report = report
        self.length = length
        self._rows: dict[str, list[Row]] = {}
        for row in report.rows:
            if row.length == length:
                self._rows.setdefault(row.method, []).append(row)
        self._full = {(row.sample, row.mode, row.turn): row for row in self.rows(FULL)}
        self.answered = frozenset(
            task for task in report.options.tasks if self.gain(task).low > 0.0
        )

    def rows(self, method: str, task: str | None = None) -> list[Row]:
        """Return the rows of a method, of one task or all."""
        return [row for row in self._rows.get(method, []) if task in (None, row.task)]

    def gain(self, task: str) -> Estimate:
        """Return by how much full KV's answers are better than guesses, in both modes."""
        values = [Value(row.score - row.guess, task, row.sample) for row in self.rows(FULL, task)]
        found = estimate(values, unit=1.0)
        assert found is not None
        return found

    def change(
        self, method: str, condition: Condition, measure: Measure, task: str | None = None
    ) -> Estimate | None:
        """Return what a method changes; None where nothing is known.

        Args:
            method: its specification.
            condition: which questions.
            measure: what is compared.
            task: one; None puts all together, or those that full KV answers.
        """
        values = [
            Value(value, row.task, row.sample)
            for row in self.rows(method, task)
            if condition.holds(row)
            and (not measure.answered or row.task in self.answered)
            and (value := measure.value(row, self._full[row.sample, row.mode, row.turn]))
            is not None
        ]
        return estimate(values, unit=measure.unit)

    def held_share(self, method: str) -> float:
        """Return the slots that a method holds after prefill, as a share of full KV's."""
        return fmean(
            row.held_slots / held
            for row in self.rows(method)
            if row.held_slots and (held := self._full[row.sample, row.mode, row.turn].held_slots)
        )

    def cached_tokens(self, method: str, mode: Mode) -> tuple[float, float] | None:
        """Return the tokens that were cached of later questions' prompts, and all of them; means.

        None if there are no later questions.
        """
        later = [row for row in self.rows(method) if row.mode == mode and row.turn]
        if not later:
            return None
        return fmean(row.cached_tokens for row in later), fmean(row.prompt_tokens for row in later)


def scbench_tables(report: SCBenchReport) -> list[ResultTable]:
    """Return the tables of each length."""
    return [
        table
        for length in report.options.lengths
        for table in _tables(LengthResults(report, length))
    ]


def _tables(results: LengthResults) -> Iterator[ResultTable]:
    yield _full_kv(results)
    variants = [
        variant for variant in results.report.variants if results.rows(variant.specification)
    ]
    if not variants:
        return
    for measure in MEASURES:
        yield _losses(results, variants, measure)
    for condition in (
        Condition("in turns", "turns", "held"),
        Condition("in requests", "requests", "held"),
    ):
        held = [v for v in variants if results.change(v.specification, condition, LOGPROB)]
        if held:
            yield _by_task(results, held, condition)


def _full_kv(results: LengthResults) -> ResultTable:
    rows = []
    for name in results.report.options.tasks:
        task, found = TASKS[name], results.rows(FULL, name)
        row = {"task": name, "needs": task.capability, "scored by": task.measure}
        for mode in MODES:
            own = [each for each in found if each.mode == mode]
            score = estimate([Value(each.score, name, each.sample) for each in own], unit=1.0)
            logprob = estimate([Value(each.logprob or 0.0, name, each.sample) for each in own])
            row[mode] = _NOTHING if score is None else _points(score).lstrip("+")
            row[f"log-prob, {mode}"] = _NOTHING if logprob is None else _nats(logprob)
        row["guess"] = f"{100 * fmean(each.guess for each in found):.1f}"
        row["answers"] = "yes" if name in results.answered else "not shown"
        row["tokens"] = f"{fmean(each.prompt_tokens for each in found):,.0f}"
        rows.append(row)
    return ResultTable(
        title=f"What full KV answers at {results.length:,} tokens",
        titled=True,
        rows=rows,
        labels=3,
        caption=_conditions(results),
    )


def _conditions(results: LengthResults) -> str:
    """Return what was measured on what, and what the columns of the first table are."""
    report = results.report
    cached = (
        f"{found[0]:,.0f} of {found[1]:,.0f} in {mode}"
        for mode in MODES
        if (found := results.cached_tokens(FULL, mode)) is not None
    )
    refused = "".join(f" {name}: {reason}." for name, reason in report.refused.items())
    return (
        f"{report.model}, {report.backend}; contexts per task: {report.options.contexts}, questions"
        f" each: {report.options.turns}; text of {report.text}. Scores in percent with 95%"
        " intervals over contexts; log-probabilities in nats per token of the right answer. Guess:"
        " the score of the right answers to the context's other questions; answers: whether full KV"
        " is shown to be better than that. Tokens: of a prompt. Tokens of later questions' prompts"
        f" that were in the prefix cache: {', '.join(cached) or 'none'}. {report.machine}.{refused}"
    )


def _losses(results: LengthResults, variants: Sequence[Variant], measure: Measure) -> ResultTable:
    rows = []
    for variant in variants:
        row = _heads(results, variant)
        for condition in CONDITIONS:
            found = results.change(variant.specification, condition, measure)
            row[condition.title] = _NOTHING if found is None else measure.shown(found)
        rows.append(row)
    answered = ", ".join(task for task in results.report.options.tasks if task in results.answered)
    which = f" These are: {answered or 'none'}." if measure.answered else ""
    return ResultTable(
        title=f"{measure.title}, at {results.length:,} tokens",
        titled=True,
        rows=rows,
        labels=1,
        caption=f"{measure.caption}{which}",
    )


def _by_task(
    results: LengthResults, variants: Sequence[Variant], condition: Condition
) -> ResultTable:
    rows = []
    for variant in variants:
        row = {"method": variant.specification}
        for task in results.report.options.tasks:
            found = results.change(variant.specification, condition, LOGPROB, task)
            row[task] = _NOTHING if found is None else _nats(found)
        rows.append(row)
    return ResultTable(
        title=f"Log-probability by task {condition.title}, held, at {results.length:,} tokens",
        titled=True,
        rows=rows,
        labels=1,
        caption="Change from full KV, in nats per token of the right answer; first turns included.",
    )


def _heads(results: LengthResults, variant: Variant) -> dict[str, str]:
    share = results.held_share(variant.specification)
    return {"method": variant.specification, "slots": f"{share:.0%}"}
