"""Quality against the window, and what the window costs.

Every hole is asked with several windows of its whole document (``infill/window.py``), each as the
planner places it where a document is opened at the hole. The smallest window that is as good as the
best is chosen, see ``choice``. ``window_costs`` counts what each window costs.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

from rich.table import Table

from midfill.errors import MidfillError, OptionError
from midfill.infill.window import WindowRule
from midfill.lab.evaluation.choice import (
    Cells,
    Choice,
    ChoiceWords,
    choice_caption,
    choice_measurement,
    choice_result_tables,
    choose_cheapest,
    half_of,
    indices_of_task,
    plot_choice,
)
from midfill.lab.evaluation.conditions import Condition
from midfill.lab.evaluation.problems import FILE_TASKS, Task
from midfill.lab.evaluation.report import rich_table, titled_markdown
from midfill.lab.evaluation.run import InfillingReport, Outcome
from midfill.lab.evaluation.summary import tasks_of

DEFAULT_WINDOWS = "400/150,800/250,1200/400,2000/600,4000/1000"
DEFAULT_SHORTEST = 12_000


def parse_windows(text: str) -> tuple[WindowRule, ...]:
    """Parse windows such as "400/150,1200/400"; the smallest first.

    Raises:
        MidfillError: it is something else, or fewer than two.
    """
    rules = set()
    for part in (each.strip() for each in text.split(",")):
        numbers = part.split("/")
        if len(numbers) != 2 or not all(one.isascii() and one.isdigit() for one in numbers):
            raise OptionError(
                f"--windows takes characters before and after the caret, like {DEFAULT_WINDOWS},"
                f" not {part!r}"
            )
        rules.add(WindowRule(int(numbers[0]), int(numbers[1])))
    if len(rules) < 2:
        raise OptionError("--windows names one window; there is nothing to choose from")
    return tuple(sorted(rules, key=_size))


def check_tasks(tasks: Iterable[Task]) -> None:
    """Check that documents can be long.

    Raises:
        MidfillError: a task is not about files.
    """
    for task in tasks:
        if task not in FILE_TASKS:
            raise MidfillError(f"task {task}: its documents are too short; windows need --files")


def window_name(rule: WindowRule) -> str:
    """Return a window's name in tables."""
    return f"{rule.before}/{rule.after}"


def window_conditions(rules: Sequence[WindowRule]) -> tuple[Condition, ...]:
    """Return a condition for each window."""
    return tuple(
        Condition(window_name(rule), "planner", healing=True, window=rule) for rule in rules
    )


def choose_window(
    report: InfillingReport, *, score: str = "similarity", margin: float = 0.02
) -> Choice:
    """Choose the window from a report whose conditions are those of ``window_conditions``.

    Raises:
        MidfillError: the report lacks the score, or all its holes are of one file.
    """
    names = sorted(report.outcomes, key=lambda name: _size(rule_of(name)))
    return choose_cheapest(report, names, score, margin)


def rule_of(name: str) -> WindowRule:
    """Return the window that a condition is named for.

    Raises:
        MidfillError: it is no window.
    """
    before, slash, after = name.partition("/")
    if not (slash and before.isdigit() and after.isdigit()):
        raise MidfillError(f"condition {name!r} is no window: see 'midfill eval windows --help'")
    return WindowRule(int(before), int(after))


def _size(rule: WindowRule) -> tuple[int, int]:
    return rule.before + rule.after, rule.before


_FIELDS = {"opened": "tokens, opened", "moved": "caret moved", "typed": "typed"}


def window_tables(report: InfillingReport, choice: Choice) -> list[Table]:
    """Return tables for the terminal: each task's costs and scores by window, and the choice."""
    found = choice_result_tables(report, choice, _words(report), _cells(report))
    tables = [rich_table(table) for table in found]
    tables[-1].caption = _caption(report, choice)
    return tables


def window_markdown(report: InfillingReport, choice: Choice) -> str:
    """Return the tables for a document."""
    found = choice_result_tables(report, choice, _words(report), _cells(report))
    return "\n\n".join([*map(titled_markdown, found), _caption(report, choice)])


def plot_windows(report: InfillingReport, choice: Choice, path: Path) -> None:
    """Plot the score against the window, on either half; the file's suffix chooses the format."""
    plot_choice(report, choice, _words(report), path)


def window_measurement(report: InfillingReport, choice: Choice) -> dict[str, object]:
    """Return how a window was measured, to be noted beside the model; plain values."""
    return {
        **choice_measurement(report, choice),
        "shortest_file": report.options.shortest,
        "mean_tokens": {
            name: {field: round(mean(_tokens(outcomes, field)), 1) for field in _FIELDS}
            for name, outcomes in report.outcomes.items()
        },
    }


def _cells(report: InfillingReport) -> dict[Task, Cells]:
    """Return what each window's requests compute, over the holes that the tables show."""
    other = half_of(report, "report")
    cells: dict[Task, Cells] = {}
    for task in tasks_of(other):
        indices = indices_of_task(other, task)
        cells[task] = {
            name: {
                title: f"{mean(_tokens([outcomes[index] for index in indices], field)):.0f}"
                for field, title in _FIELDS.items()
            }
            for name, outcomes in other.outcomes.items()
        }
    return cells


def _tokens(outcomes: Sequence[Outcome], field: str) -> list[int]:
    return [getattr(one.cost, field) for one in outcomes if one.cost is not None]


def _caption(report: InfillingReport, choice: Choice) -> str:
    outcomes = report.outcomes[choice.recommended]
    most = ", ".join(f"{max(_tokens(outcomes, field))} {field}" for field in _FIELDS)
    return (
        f"{choice_caption(report, choice, _words(report))} Tokens are those computed, means over"
        f" holes; the most of any hole with {choice.recommended}: {most}."
    )


def _words(report: InfillingReport) -> ChoiceWords:
    return ChoiceWords(
        one="window",
        axis="characters before / after the caret",
        recommendation="Window",
        cheapest="the smallest",
        prompts=f"files of at least {report.options.shortest} characters, sent whole",
    )
