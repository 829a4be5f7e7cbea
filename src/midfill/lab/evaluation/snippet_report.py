"""Results of ``eval snippets`` as tables, Markdown, plots, and what is noted beside a model."""

from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from midfill.lab.evaluation.choice import (
    Choice,
    ChoiceWords,
    choice_measurement,
    choice_result_tables,
    plot_choice,
)
from midfill.lab.evaluation.report import LEGEND, estimate_cell, rich_table, titled_markdown
from midfill.lab.evaluation.run import InfillingReport
from midfill.lab.evaluation.snippets import ShownSnippets, is_plain, parse_snippets
from midfill.lab.evaluation.summary import SCORES, Estimate, estimate_difference
from midfill.system.reporting.result_table import ResultTable

_WORDS = ChoiceWords(
    one="characters",
    axis="characters of snippets",
    recommendation="Snippets",
    cheapest="the fewest characters",
    prompts="",
)


def snippet_tables(report: InfillingReport, choice: Choice) -> list[Table]:
    """Return tables for the terminal: scores by amount of chunks, the choice, other chunks."""
    tables = [rich_table(table) for table in _tables(report, choice)]
    tables[-1].caption = _caption(report, choice)
    return tables


def snippet_markdown(report: InfillingReport, choice: Choice) -> str:
    """Return the tables for a document."""
    found = map(titled_markdown, _tables(report, choice))
    return "\n\n".join([*found, _caption(report, choice)])


def plot_snippets(report: InfillingReport, choice: Choice, path: Path) -> None:
    """Plot the score against the amount, on either half; the file's suffix chooses the format."""
    plot_choice(report, choice, _WORDS, path)


def snippet_measurement(report: InfillingReport, choice: Choice) -> dict[str, object]:
    """Return how an amount was measured, to be noted beside the model; plain values."""
    return {
        **choice_measurement(report, choice),
        "characters_around_the_caret": [report.options.before, report.options.after],
    }


def _caption(report: InfillingReport, choice: Choice) -> str:
    other = estimate_cell(choice.on_other_holes, signed=True)
    options = report.options
    return (
        f"Snippets: {choice.recommended}, the fewest characters than which no more have a better"
        f" {SCORES[choice.score]} beyond doubt (95% interval of the paired difference, on"
        f" {choice.choice[0].score.count} holes). On the other {choice.report[0].score.count} holes"
        f" it is at {other} of the best, {choice.best}. {report.model}; at most {options.before}"
        f" characters before and {options.after} after the caret, greedy, healed, seed"
        f" {options.seed}. {LEGEND}"
    )


def _tables(report: InfillingReport, choice: Choice) -> Iterator[ResultTable]:
    yield from choice_result_tables(report, choice, _WORDS)
    if effects := list(_effects(report)):
        yield ResultTable(title="Snippets, minus others, all tasks and holes", rows=effects)


def _effects(report: InfillingReport) -> Iterator[dict[str, str]]:
    """Yield what chunks change: any, and others than the newest in front, on all holes."""
    shown = parse_snippets(",".join(report.outcomes))
    plain = [one for one in shown if is_plain(one)]
    for one in shown:
        other = plain[0] if is_plain(one) else ShownSnippets(one.characters)
        if other == one or other not in plain:
            continue
        yield {
            "characters": one.name,
            "minus": other.name,
            **{
                SCORES[score]: estimate_cell(_difference(report, other, one, score), signed=True)
                for score in SCORES
                if all(score in outcome.scores for outcome in report.outcomes[one.name])
            },
        }


def _difference(
    report: InfillingReport, first: ShownSnippets, second: ShownSnippets, score: str
) -> Estimate:
    groups = [problem.group for problem in report.problems]
    one, two = (
        [outcome.scores[score] for outcome in report.outcomes[shown.name]]
        for shown in (first, second)
    )
    return estimate_difference(one, two, groups)
