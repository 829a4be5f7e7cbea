"""An evaluation run: every problem in every condition, with answers scored and programs tested."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import msgspec

from midfill.errors import MidfillError
from midfill.evaluation.conditions import Condition, PromptOptions, make_prompt
from midfill.evaluation.holes import draw_holes, read_files
from midfill.evaluation.humaneval import HOW_TO_GET_IT, load_humaneval
from midfill.evaluation.metrics import score_answer
from midfill.evaluation.models import Answer, Model
from midfill.evaluation.problems import (
    FILE_TASKS,
    LINE_TASKS,
    PUBLIC_TASKS,
    Problem,
    Task,
    max_tokens,
    sample_problems,
)
from midfill.evaluation.sandbox.pool import Program, Sandbox
from midfill.infill.trim import first_line
from midfill.system.progress import Progress, StageProgress

_MAX_FILE_HOLES = 1000  # per task, for files without a limit
_BATCH_SIZE = 32


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, and how; the same options give the same prompts.

    Attributes:
        tasks: kinds of holes.
        limit: maximum number of problems per task; 0 takes all (of files, a thousand).
        seed: seed of all randomness.
        before, after: maximum characters of prefix and suffix in a prompt.
        typed: see ``PromptOptions``.
        max_tokens: maximum tokens of an answer; None takes each task's default.
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
    """The result of one problem in one condition.

    Attributes:
        answer: the model's text.
        ended: whether the answer ended by itself.
        scores: name -> 0 to 1: those of ``score_answer`` and, where the problem has a test,
            "pass" and "pass_first_line".
        verdict: how the answer's program ended; "" where the problem has no test.
    """

    answer: str
    ended: bool
    scores: dict[str, float]
    verdict: str = ""


class InfillingReport(msgspec.Struct, frozen=True, kw_only=True):
    """All results of a run.

    Attributes:
        model: the model and what computed its answers.
        options: of the run.
        isolation: how programs were isolated; "" where none ran.
        problems: the problems so far.
        outcomes: condition -> one outcome per problem, in order.
        format: version of this record.
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
    """Load the problems of a run, grouped by task.

    Args:
        options: of the run.
        humaneval: the data folder of HumanEval-Infilling, if given.
        files: Python files, and folders of them.

    Raises:
        MidfillError: a task's data is missing.
    """
    sources = read_files(files) if files else []
    problems: list[Problem] = []
    for task in options.tasks:
        if task in PUBLIC_TASKS:
            if humaneval is None:
                raise MidfillError(f"task {task} needs --humaneval FOLDER: {HOW_TO_GET_IT}")
            found = load_humaneval(humaneval, task)
            problems += sample_problems(found, options.limit, options.seed)
        elif task in FILE_TASKS:
            if not sources:
                raise MidfillError(f"task {task} needs --files: Python files to cut holes into")
            count = options.limit or _MAX_FILE_HOLES
            problems += draw_holes(sources, task, count, options.seed)
    return problems


def evaluate(
    model: Model,
    problems: Sequence[Problem],
    conditions: Sequence[Condition],
    options: RunOptions,
    progress: Progress,
    save: Callable[[InfillingReport], None],
) -> InfillingReport:
    """Ask every problem in every condition and score the answers.

    Each batch of problems goes through all conditions before the next one, so that what their
    prompts share is computed once.

    Args:
        model: the model to evaluate.
        problems: from ``load_problems``.
        conditions: from ``choose_conditions``.
        options: of the run.
        progress: called with (task and condition, answers so far, all answers).
        save: called with the report so far after each batch.

    Raises:
        MidfillError: a prompt is too long, the server failed, or the sandbox can't be used.
    """
    if model.remote:
        problems = [problem for problem in problems if not _contains_sentinel(problem, model)]
    if not problems:
        raise MidfillError("there is no problem to ask: all of them contain a FIM token")
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
        for batch in _batches(problems):
            for condition in conditions:
                stage, before = f"{batch[0].task}, {condition.name}", done

                def answered(count: int, _: int, stage: str = stage, before: int = before) -> None:
                    progress(stage, before + count, total)

                answers = _ask(model, batch, condition, options, answered)
                report.outcomes[condition.name] += _judge(batch, answers, sandbox)
                done += len(batch)
            report.problems.extend(
                ProblemRecord(problem.id, problem.task, problem.group, problem.digest)
                for problem in batch
            )
            save(report)
    return report


def _batches(problems: Sequence[Problem]) -> Iterator[list[Problem]]:
    """Yield the problems in batches, each of one task."""
    for _, group in groupby(problems, key=lambda problem: problem.task):
        same = list(group)
        for start in range(0, len(same), _BATCH_SIZE):
            yield same[start : start + _BATCH_SIZE]


def _ask(
    model: Model,
    problems: Sequence[Problem],
    condition: Condition,
    options: RunOptions,
    progress: StageProgress,
) -> list[Answer]:
    prompt_options = PromptOptions(
        before=options.before,
        after=options.after,
        typed=options.typed,
        seed=options.seed,
        keeps_tokens=model.keeps_tokens,
    )
    prompts = [
        make_prompt(condition, model.format, problem, prompt_options) for problem in problems
    ]
    limit = max_tokens(problems[0].task, options.max_tokens)
    return model.answer(prompts, limit, condition.healing, progress)


def _judge(
    problems: Sequence[Problem], answers: Sequence[Answer], sandbox: Sandbox | None
) -> list[Outcome]:
    """Score answers, and run the programs they complete."""
    programs = [_programs(*pair) for pair in zip(problems, answers, strict=True)]
    verdicts: dict[Program, str] = {}
    if sandbox is not None:
        # An answer of one line is also its own first line: its program runs once.
        unique = list(dict.fromkeys(program for made in programs for program in made.values()))
        found = sandbox.run(unique)
        verdicts = {program: verdict.reason for program, verdict in zip(unique, found, strict=True)}
    outcomes = []
    for problem, answer, made in zip(problems, answers, programs, strict=True):
        passed = {name: float(verdicts[program] == "passed") for name, program in made.items()}
        outcomes.append(
            Outcome(
                answer=answer.text,
                ended=answer.ended,
                scores=passed | score_answer(problem, answer),
                verdict=verdicts[made["pass"]] if made else "",
            )
        )
    return outcomes


def _programs(problem: Problem, answer: Answer) -> dict[str, Program]:
    """Return the programs that an answer completes, by the score that each decides."""
    if problem.test is None:
        return {}
    programs = {"pass": problem.program(answer.text)}
    if problem.task in LINE_TASKS:
        # The hole includes its line break; what a model writes after it is ignored here.
        end = "\n" if problem.hole.endswith("\n") else ""
        programs["pass_first_line"] = problem.program(first_line(answer.text) + end)
    return programs


def _contains_sentinel(problem: Problem, model: Model) -> bool:
    """Return whether a server would parse a sentinel in the problem's own text."""
    if model.format is None:
        return False
    sentinels = (model.format.prefix, model.format.suffix, model.format.middle)
    return any(
        sentinel is not None and sentinel.text in text
        for sentinel in sentinels
        for text in (problem.prefix, problem.suffix)
    )
