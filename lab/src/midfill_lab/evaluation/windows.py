"""Quality against the window, and what the window costs.

Every hole is asked with several windows of its whole document (``infill/window.py``), each as the
planner places it where a document is opened at the hole. The smallest window that is as good as the
best is chosen, see ``choice``. ``run.measure_costs`` counts what each window costs.
"""

from collections.abc import Sequence
from statistics import mean

from midfill.errors import MidfillError, OptionError
from midfill.infill.window import WindowRule
from midfill_lab.evaluation.choice import (
    Cells,
    MeasuredChoice,
    cheapest_caption,
    choose_cheapest,
    half_of,
    indices_of_task,
)
from midfill_lab.evaluation.conditions import Condition
from midfill_lab.evaluation.evaluate import InfillingReport, Outcome
from midfill_lab.evaluation.problems import Task
from midfill_lab.evaluation.summary import tasks_of

_FIELDS = {"opened": "tokens, opened", "moved": "caret moved", "typed": "typed"}
DEFAULT_WINDOWS = "400/150,800/250,1200/400,2000/600,4000/1000"


def parse_windows(text: str) -> tuple[WindowRule, ...]:
    """Parse windows such as "400/150,1200/400"; the smallest first.

    Raises:
        MidfillError: it is something else, or fewer than two.
    """
    rules = set()
    for part in (each.strip() for each in text.split(",")):
        numbers = part.split("/")
        if len(numbers) != 2 or not all(
            number.isascii() and number.isdigit() for number in numbers
        ):
            raise OptionError(
                f"--windows takes characters before and after the caret, like {DEFAULT_WINDOWS},"
                f" not {part!r}"
            )
        rules.add(WindowRule(int(numbers[0]), int(numbers[1])))
    if len(rules) < 2:
        raise OptionError("--windows names one window; there is nothing to choose from")
    return tuple(sorted(rules, key=_size))


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
) -> MeasuredChoice:
    """Choose the window from a report whose conditions are those of ``window_conditions``.

    Raises:
        MidfillError: the report lacks the score, or all its holes are of one file.
    """
    names = sorted(report.outcomes, key=lambda name: _size(rule_of(name)))
    choice = choose_cheapest(report, names, score, margin)
    shortest = report.options.shortest
    prompts = f"files of at least {shortest} characters, sent whole"
    caption = cheapest_caption(report, choice, "Window", "the smallest", prompts)
    outcomes = report.outcomes[choice.recommended]
    most = ", ".join(f"{max(_tokens(outcomes, field))} {field}" for field in _FIELDS)
    return MeasuredChoice(
        report=report,
        choice=choice,
        column="window",
        axis="characters before / after the caret",
        caption=f"{caption} Tokens are those computed, means over holes; the most of any hole with"
        f" {choice.recommended}: {most}.",
        cells=_cells(report),
        notes={
            "shortest_file": shortest,
            "mean_tokens": {
                name: {field: round(mean(_tokens(outcomes, field)), 1) for field in _FIELDS}
                for name, outcomes in report.outcomes.items()
            },
        },
    )


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
    return [getattr(outcome.cost, field) for outcome in outcomes if outcome.cost is not None]
