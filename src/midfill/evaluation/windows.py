"""Quality against the window, and what the window costs.

Every hole is asked with several windows of its whole document (``infill/window.py``), each as the
planner places it where a document is opened at the hole. The smallest window that is as good as the
best is chosen, see ``choice``. What a window costs is counted by the engine: the prompt tokens that
it computes when a document is opened, when the caret moves on by a line, and when text is typed.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from midfill.errors import MidfillError
from midfill.evaluation.choice import Choice, choose_cheapest
from midfill.evaluation.conditions import Condition
from midfill.evaluation.holes import draw_holes
from midfill.evaluation.problems import FILE_TASKS, Problem
from midfill.evaluation.run import InfillingReport, RunOptions
from midfill.evaluation.source_files import SourceFile
from midfill.infill.request import InfillRequest
from midfill.infill.window import WindowRule
from midfill.system.progress import StageProgress

DEFAULT_WINDOWS = "400/150,800/250,1200/400,2000/600,4000/1000"
DEFAULT_SHORTEST = 12_000
_MAX_HOLES = 1000  # per task, without a limit
_TYPED = "value"
_BATCH = 16  # holes; what a batch computed is still cached when its carets move


class TokenCounter(Protocol):
    """A model that says what requests cost."""

    def count_computed(self, requests: Sequence[InfillRequest]) -> list[int]:
        """Return the prompt tokens that each request computes; all are asked at once."""
        ...


class WindowCost(msgspec.Struct, frozen=True):
    """Prompt tokens that one hole's requests compute with one window.

    Attributes:
        cold: of the first request, with the caret at the end of the line before the hole's.
        moved: of the next one, with the caret at the hole.
        typed: of the next one, after a word was typed there.
    """

    cold: int
    moved: int
    typed: int


def parse_windows(text: str) -> tuple[WindowRule, ...]:
    """Parse windows such as "400/150,1200/400"; the smallest first.

    Raises:
        MidfillError: it is something else, or fewer than two.
    """
    rules = set()
    for part in (each.strip() for each in text.split(",")):
        numbers = part.split("/")
        if len(numbers) != 2 or not all(one.isascii() and one.isdigit() for one in numbers):
            raise MidfillError(
                f"--windows takes characters before and after the caret, like {DEFAULT_WINDOWS},"
                f" not {part!r}"
            )
        rules.add(WindowRule(int(numbers[0]), int(numbers[1])))
    if len(rules) < 2:
        raise MidfillError("--windows names one window; there is nothing to choose from")
    return tuple(sorted(rules, key=_size))


def window_name(rule: WindowRule) -> str:
    """Return a window's name in tables."""
    return f"{rule.before}/{rule.after}"


def window_conditions(rules: Sequence[WindowRule]) -> tuple[Condition, ...]:
    """Return a condition for each window."""
    return tuple(
        Condition(window_name(rule), "planner", healing=True, window=rule) for rule in rules
    )


def draw_window_holes(
    files: Sequence[SourceFile], options: RunOptions, shortest: int
) -> list[Problem]:
    """Draw holes in long files, grouped by task.

    Args:
        files: of any length.
        options: tasks, limit and seed.
        shortest: characters of the shortest file to use.

    Raises:
        MidfillError: a task is not about files, or there is no such file or hole.
    """
    long = [file for file in files if len(file.text) >= shortest]
    if not long:
        raise MidfillError(f"no file has {shortest} characters; see --shortest")
    problems: list[Problem] = []
    for task in options.tasks:
        if task not in FILE_TASKS:
            raise MidfillError(f"task {task}: its documents are too short; windows need --files")
        problems += draw_holes(long, task, options.limit or _MAX_HOLES, options.seed)
    return problems


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


def measure_costs(
    model: TokenCounter,
    problems: Sequence[Problem],
    rules: Sequence[WindowRule],
    progress: StageProgress,
) -> dict[str, list[WindowCost]]:
    """Count what every hole's requests compute, by window.

    Args:
        model: answers one token per request.
        problems: the holes.
        rules: the windows.
        progress: called with (holes so far times windows, all of them).
    """
    costs: dict[str, list[WindowCost]] = {window_name(rule): [] for rule in rules}
    total = len(problems) * len(rules)
    for start in range(0, len(problems), _BATCH):
        batch = problems[start : start + _BATCH]
        for rule in rules:
            steps = zip(*(_requests(problem, rule) for problem in batch), strict=True)
            counts = [model.count_computed(step) for step in steps]
            costs[window_name(rule)] += [WindowCost(*found) for found in zip(*counts, strict=True)]
            progress(sum(map(len, costs.values())), total)
    return costs


def _requests(problem: Problem, rule: WindowRule) -> list[InfillRequest]:
    """Return the requests of a document that is opened, moved in, and typed in."""
    text, caret = problem.prefix + problem.suffix, len(problem.prefix)
    line = text.rfind("\n", 0, caret) + 1
    above = line - 1 if line else text.find("\n", caret) + 1 or len(text)
    typed = problem.prefix + _TYPED, problem.suffix
    return [
        InfillRequest(
            prefix=prefix, suffix=suffix, window=rule, tenant=f"{problem.id} {window_name(rule)} *"
        )
        for prefix, suffix in ((text[:above], text[above:]), (text[:caret], text[caret:]), typed)
    ]


def _size(rule: WindowRule) -> tuple[int, int]:
    return rule.before + rule.after, rule.before
