"""Quality against the amount of other text: an editor plugin's chunks before the document.

llama.vim and llama.vscode keep a ring of 16 chunks of 32 lines: what the user has seen, of the same
file and of others. Here the user has visited places at random, half of them in the hole's own file
(not near the caret, which the prompt shows anyway), the others in three files of the same
repository that are nearest in the tree. So the ring is one of a session without direction.

Every hole is asked with more and more of these chunks. Since they cost tokens in every prompt, the
fewest characters are chosen than which no more are better beyond doubt, see ``choice``.
"""

import random
from collections.abc import Iterator, Sequence

import msgspec

from midfill.errors import OptionError
from midfill.infill.context_files import ContextFile
from midfill_lab.evaluation.choice import MeasuredChoice, choose_unless_better
from midfill_lab.evaluation.conditions import Condition
from midfill_lab.evaluation.evaluate import InfillingReport
from midfill_lab.evaluation.problems import Problem
from midfill_lab.evaluation.report import LEGEND, estimate_cell
from midfill_lab.evaluation.source_files import SourceFile
from midfill_lab.evaluation.summary import SCORES, estimate_difference
from midfill_lab.reporting import ResultTable

_RING = 16  # chunks
_LINES, _MIN_LINES = 32, 3  # of a chunk
_SHOWN_BEFORE, _SHOWN_AFTER = 64, 32  # lines around the caret that chunks leave out
_FILES = 3
_OWN = 0.5  # share of chunks from the hole's own file
_ATTEMPTS = 200


def parse_snippets(text: str) -> tuple[int, ...]:
    """Parse numbers of characters such as "0,1000,2000"; the least first.

    Raises:
        MidfillError: it is something else, or fewer than two.
    """
    amounts = set()
    for part in (each.strip() for each in text.split(",")):
        if not (part.isascii() and part.isdigit()):
            raise OptionError(
                f"--snippets takes numbers of characters, like 0,1000,2000, not {part!r}"
            )
        amounts.add(int(part))
    if len(amounts) < 2:
        raise OptionError("--snippets names fewer than two numbers to choose from, as 0,2000 does")
    return tuple(sorted(amounts))


def snippet_conditions(amounts: Sequence[int]) -> tuple[Condition, ...]:
    """Return a condition for each number of characters."""
    return tuple(
        Condition(str(amount), "planner", healing=True, snippets=amount) for amount in amounts
    )


def choose_snippets(report: InfillingReport, *, score: str = "similarity") -> MeasuredChoice:
    """Choose the number of characters from a report with conditions of ``snippet_conditions``.

    Raises:
        MidfillError: the report lacks the score, or all its holes are of one file.
    """
    names = [str(amount) for amount in parse_snippets(",".join(report.outcomes))]
    choice = choose_unless_better(report, names, score)
    other = estimate_cell(choice.on_other_holes, signed=True)
    before, after = report.options.before, report.options.after
    return MeasuredChoice(
        report=report,
        choice=choice,
        column="characters",
        axis="characters of snippets",
        caption=f"Snippets: {choice.recommended}, the fewest characters than which no more have a"
        f" better {SCORES[score]} beyond doubt (95% interval of the paired difference, on"
        f" {choice.choice[0].score.count} holes). On the other {choice.report[0].score.count} holes"
        f" it is at {other} of the best, {choice.best}. {report.model}; at most {before} characters"
        f" before and {after} after the caret, greedy, healed, seed {report.options.seed}."
        f" {LEGEND}",
        more_tables=[
            ResultTable(
                title="Snippets, minus others, all tasks and holes",
                rows=list(_effects(report, names)),
            )
        ],
        notes={"characters_around_the_caret": [before, after]},
    )


def _effects(report: InfillingReport, names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield what each amount changes beside the least one, on all holes."""
    groups = [problem.group for problem in report.problems]
    least, *more = names
    for name in more:
        row = {"characters": name, "minus": least}
        for score, title in SCORES.items():
            if all(score in outcome.scores for outcome in report.outcomes[name]):
                before, after = (
                    [outcome.scores[score] for outcome in report.outcomes[each]]
                    for each in (least, name)
                )
                row[title] = estimate_cell(estimate_difference(before, after, groups), signed=True)
        yield row


def with_snippets(
    problems: Sequence[Problem], files: Sequence[SourceFile], seed: int
) -> list[Problem]:
    """Return the problems with the chunks in an editor plugin's ring, the oldest first.

    All randomness follows from the seed and the hole, so that every model gets the same chunks.

    Args:
        problems: holes of these files.
        files: all files of the run.
        seed: of all chance.
    """
    drawn = []
    for problem in problems:
        chance = random.Random(f"{seed}/chunks/{problem.id}")
        drawn.append(msgspec.structs.replace(problem, snippets=_visits(problem, files, chance)))
    return drawn


def _visits(
    problem: Problem, files: Sequence[SourceFile], chance: random.Random
) -> tuple[ContextFile, ...]:
    own = (problem.prefix + problem.suffix).split("\n")
    caret = problem.prefix.count("\n")
    above, below = own[: max(0, caret - _SHOWN_BEFORE)], own[caret + _SHOWN_AFTER :]
    others = [(file.name, file.text.split("\n")) for file in _nearest(problem.group, files, chance)]
    visits: list[ContextFile] = []
    starts: dict[int, list[int]] = {}  # by text, where chunks of it start
    for _ in range(_ATTEMPTS):
        if len(visits) == 2 * _RING:
            break
        if chance.random() < _OWN or not others:
            name, lines = problem.group, chance.choice((above, below))
        else:
            name, lines = chance.choice(others)
        start = chance.randint(0, max(0, len(lines) - _LINES))
        seen = starts.setdefault(id(lines), [])
        if len(lines) < _MIN_LINES or any(abs(start - other) < _LINES // 2 for other in seen):
            continue
        seen.append(start)
        text = "\n".join(lines[start : start + _LINES]) + "\n"
        visits.append(ContextFile(text, name.rpartition("/")[2]))
    # The older ones have left the ring.
    return tuple(visits[max(len(visits) - _RING, len(visits) // 2) :])


def _nearest(name: str, files: Sequence[SourceFile], chance: random.Random) -> list[SourceFile]:
    """Return other files that have most folders in common with one."""
    folders = name.split("/")[:-1]

    def shared(file: SourceFile) -> int:
        pairs = zip(folders, file.name.split("/")[:-1], strict=False)
        return next((place for place, (a, b) in enumerate(pairs) if a != b), len(folders))

    others = [file for file in files if file.name != name]
    chance.shuffle(others)
    return sorted(others, key=lambda file: -shared(file))[:_FILES]
