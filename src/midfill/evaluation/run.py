"""A run: every problem asked in every condition, answers scored, programs tested."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import msgspec

from midfill.errors import MidfillError
from midfill.evaluation.conditions import Condition, PromptOptions, make_prompt
from midfill.evaluation.holes import cut_holes, read_files
from midfill.evaluation.humaneval import WHERE, load_humaneval
from midfill.evaluation.metrics import completes_word, is_exact, is_exact_first_line, similarity
from midfill.evaluation.models import Answer, Model
from midfill.evaluation.problems import (
    FILE_TASKS,
    LINE_TASKS,
    PUBLIC_TASKS,
    Problem,
    Task,
    choose,
    max_tokens,
)
from midfill.evaluation.sandbox import Sandbox
from midfill.infill.trim import first_line
from midfill.system.progress import Progress, StageProgress

_ALL_HOLES = 1000  # of a kind, in files that could be cut anywhere
_AT_A_TIME = 32


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, and how; the same options give the same prompts.

    Attributes:
        tasks: kinds of holes.
        limit: most problems of a kind; 0 for all (of files, a thousand).
        seed: of every choice.
        before, after: most characters of prefix and suffix that the model sees.
        typed: see ``PromptOptions``.
        max_tokens: longest answer; None for what fits the kind of hole.
    """

    tasks: tuple[Task, ...]
    limit: int = 200
    seed: int = 0
    before: int = 2000
    after: int = 1000
    typed: bool = False
    max_tokens: int | None = None


class ProblemRecord(msgspec.Struct, frozen=True):
    """A problem in a report; see ``Problem``."""

    id: str
    task: Task
    group: str
    digest: str


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of one problem in one condition.

    Attributes:
        answer: the model's text.
        ended: the model stopped by itself.
        scores: name -> 0 to 1, see ``score``.
        verdict: how its program ended.
    """

    answer: str
    ended: bool
    scores: dict[str, float]
    verdict: str = ""


class InfillingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one run found.

    Attributes:
        model: which one, and what computed it.
        options: of the run.
        isolation: how programs were kept apart; "" where none ran.
        problems: that were asked.
        outcomes: condition -> one outcome a problem, in order.
        format: of this record.
    """

    model: str
    options: RunOptions
    isolation: str
    problems: list[ProblemRecord]
    outcomes: dict[str, list[Outcome]]
    format: int = 1


def load_problems(
    options: RunOptions, humaneval: Path | None, files: Sequence[Path]
) -> list[Problem]:
    """The problems of a run, those of a task together.

    Raises:
        MidfillError: a task's data is missing.
    """
    sources = read_files(files) if files else []
    problems: list[Problem] = []
    for task in options.tasks:
        if task in PUBLIC_TASKS:
            if humaneval is None:
                raise MidfillError(f"task {task} needs --humaneval FOLDER: {WHERE}")
            problems += choose(load_humaneval(humaneval, task), options.limit, options.seed)
        elif task in FILE_TASKS:
            if not sources:
                raise MidfillError(f"task {task} needs --files: Python files to cut holes into")
            problems += cut_holes(sources, task, options.limit or _ALL_HOLES, options.seed)
    return problems


def evaluate(
    model: Model,
    problems: Sequence[Problem],
    conditions: Sequence[Condition],
    options: RunOptions,
    progress: Progress,
    save: Callable[[InfillingReport], None],
) -> InfillingReport:
    """Ask everything and score it.

    A few problems at a time go through all conditions: what their prompts share is computed once.

    Args:
        model: who is asked.
        problems: from ``load_problems``.
        conditions: from ``choose_conditions``.
        options: the run's.
        progress: hears (what, done, total) answers.
        save: is given the report so far after every few problems.

    Raises:
        MidfillError: a prompt is too long, the server broke off, or the sandbox can't be used.
    """
    if model.remote:
        problems = [problem for problem in problems if not _spells_sentinel(model, problem)]
    if not problems:
        raise MidfillError("there is no problem to ask: all of them spell a FIM token")
    with ExitStack() as stack:
        tested = any(problem.test for problem in problems)
        sandbox = stack.enter_context(Sandbox()) if tested else None
        report = InfillingReport(
            model=model.description,
            options=options,
            isolation=sandbox.isolation if sandbox is not None else "",
            problems=[],
            outcomes={condition.name: [] for condition in conditions},
        )
        done, total = 0, len(problems) * len(conditions)
        for some in _few(problems):
            for condition in conditions:
                what, before = f"{some[0].task}, {condition.name}", done

                def tell(answered: int, _: int, what: str = what, before: int = before) -> None:
                    progress(what, before + answered, total)

                answers = _ask(model, some, condition, options, tell)
                report.outcomes[condition.name] += _outcomes(some, answers, sandbox)
                done += len(some)
            report.problems.extend(
                ProblemRecord(problem.id, problem.task, problem.group, problem.digest)
                for problem in some
            )
            save(report)
    return report


def score(problem: Problem, answer: Answer) -> dict[str, float]:
    """The scores of an answer that need no test, 0 to 1.

    exact, similarity: of the whole answer.
    exact_first_line: of the answer up to its first line break; for holes within a line.
    subtoken: it writes the rest of the caret's word; for subtoken holes.
    stops: it ended by itself, and where the hole ends with its line, in that line.
    """
    text = answer.text
    scores = {
        "exact": float(is_exact(text, problem.hole)),
        "similarity": similarity(text, problem.hole),
        "stops": float(answer.ended and not _leaves_line(problem, text)),
    }
    if problem.task in LINE_TASKS:
        scores["exact_first_line"] = float(is_exact_first_line(text, problem.hole))
    if problem.task == "subtoken":
        scores["subtoken"] = float(completes_word(text, problem.word_rest))
    return scores


def _few(problems: Sequence[Problem]) -> Iterator[list[Problem]]:
    """The problems a few at a time, never of two tasks."""
    for _, group in groupby(problems, key=lambda problem: problem.task):
        same = list(group)
        for start in range(0, len(same), _AT_A_TIME):
            yield same[start : start + _AT_A_TIME]


def _ask(
    model: Model,
    problems: Sequence[Problem],
    condition: Condition,
    options: RunOptions,
    tell: StageProgress,
) -> list[Answer]:
    prompting = PromptOptions(
        before=options.before, after=options.after, typed=options.typed, seed=options.seed
    )
    prompts = [make_prompt(condition, model.format, problem, prompting) for problem in problems]
    most = max_tokens(problems[0].task, options.max_tokens)
    return model.answer(prompts, most, condition.healing, tell)


def _programs(problem: Problem, answer: Answer) -> dict[str, str]:
    """The programs that an answer makes, by the score that each decides."""
    if problem.test is None:
        return {}
    programs = {"pass": problem.program(answer.text)}
    if problem.task in LINE_TASKS:
        # The hole holds its line's end; what a model writes after it is not held against it.
        end = "\n" if problem.hole.endswith("\n") else ""
        programs["pass_first_line"] = problem.program(first_line(answer.text) + end)
    return programs


def _outcomes(
    problems: Sequence[Problem], answers: Sequence[Answer], sandbox: Sandbox | None
) -> list[Outcome]:
    programs = [_programs(*pair) for pair in zip(problems, answers, strict=True)]
    verdicts: dict[str, str] = {}
    if sandbox is not None:
        # An answer of one line is also its own first line: its program runs once.
        different = list(dict.fromkeys(text for made in programs for text in made.values()))
        found = sandbox.run(different)
        verdicts = {text: verdict.reason for text, verdict in zip(different, found, strict=True)}
    outcomes = []
    for problem, answer, made in zip(problems, answers, programs, strict=True):
        passed = {name: float(verdicts[text] == "passed") for name, text in made.items()}
        outcomes.append(
            Outcome(
                answer=answer.text,
                ended=answer.ended,
                scores=passed | score(problem, answer),
                verdict=verdicts[made["pass"]] if made else "",
            )
        )
    return outcomes


def _leaves_line(problem: Problem, text: str) -> bool:
    """Whether an answer goes beyond the line that its hole ends with."""
    if problem.task not in LINE_TASKS:
        return False
    return "\n" in (text.removesuffix("\n") if problem.hole.endswith("\n") else text)


def _spells_sentinel(model: Model, problem: Problem) -> bool:
    """Whether a server would find a sentinel in the problem's own text."""
    if model.format is None:
        return False
    sentinels = (model.format.prefix, model.format.suffix, model.format.middle)
    return any(
        sentinel is not None and sentinel.text in text
        for sentinel in sentinels
        for text in (problem.prefix, problem.suffix)
    )
