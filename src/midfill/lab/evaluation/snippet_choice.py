"""Quality against the amount of other text: an editor plugin's chunks before the document.

Every hole is asked with more and more of the chunks that a plugin would send there (``snippets``).
Since they cost tokens in every prompt, the fewest characters are chosen than which no more are
better beyond doubt, see ``choice``. Further conditions show what another choice of chunks, older
ones, or another place would change; nothing is chosen from these.
"""

from collections.abc import Iterable, Sequence

from midfill.errors import MidfillError
from midfill.lab.evaluation.choice import Choice, choose_unless_better
from midfill.lab.evaluation.conditions import Condition
from midfill.lab.evaluation.problems import FILE_TASKS, Task
from midfill.lab.evaluation.run import InfillingReport
from midfill.lab.evaluation.snippets import ShownSnippets, is_plain, parse_snippets

DEFAULT_SNIPPETS = "0,500,1000,2000,4000,8000,2000/alike,2000/old,2000/answer,2000/behind"


def check_tasks(tasks: Iterable[Task]) -> None:
    """Check that documents have a repository around them.

    Raises:
        MidfillError: a task is not about files.
    """
    for task in tasks:
        if task not in FILE_TASKS:
            raise MidfillError(f"task {task}: its documents stand alone; snippets need --files")


def snippet_conditions(shown: Sequence[ShownSnippets]) -> tuple[Condition, ...]:
    """Return a condition for each amount and kind of chunks."""
    return tuple(Condition(one.name, "planner", healing=True, snippets=one) for one in shown)


def choose_snippets(report: InfillingReport, *, score: str = "similarity") -> Choice:
    """Choose the number of characters from a report with conditions of ``snippet_conditions``.

    Raises:
        MidfillError: the report lacks the score, or all its holes are of one file.
    """
    shown = parse_snippets(",".join(report.outcomes))
    return choose_unless_better(report, [one.name for one in shown if is_plain(one)], score)
