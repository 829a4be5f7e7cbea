"""An evaluation run: every problem in every condition, with answers scored and programs tested."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import msgspec

from midfill.errors import MidfillError
from midfill.infill.confidence import Features
from midfill.infill.request import InfillRequest
from midfill.infill.trim import first_line
from midfill.infill.window import WindowRule
from midfill.system.progress import Progress, StageProgress
from midfill_lab.evaluation.conditions import Condition, PromptOptions, make_prompt
from midfill_lab.evaluation.holes import draw_holes
from midfill_lab.evaluation.metrics import first_text_line, score_answer
from midfill_lab.evaluation.models import Answer, Model, ModelPrompt
from midfill_lab.evaluation.problems import (
    CARET_TASKS,
    FILE_TASKS,
    HOW_TO_GET_IT,
    LINE_TASKS,
    PUBLIC_TASKS,
    Problem,
    Task,
    load_humaneval,
    max_tokens,
    sample_problems,
)
from midfill_lab.evaluation.sandbox.pool import Program, Sandbox
from midfill_lab.evaluation.source_files import DEFAULT_SUFFIXES, read_files

_MAX_FILE_HOLES = 1000  # per task, for files without a limit
_COST_BATCH = 16  # holes; what a batch computed is still cached when its carets move
_TYPED = "value"
_BATCH_ANSWERS = 512  # enough that the last answers of a batch, which run alone, cost little


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, and how; the same options give the same prompts.

    Attributes:
        tasks: kinds of holes.
        limit: maximum number of problems per task; 0 takes all (of files, a thousand).
        seed: seed of all randomness.
        before, after: maximum characters of prefix and suffix in a prompt.
        typed: see ``PromptOptions``.
        max_tokens: maximum tokens of an answer; None takes each task's default.
        suffixes: suffixes of the files that are read from folders.
        shortest: characters of the shortest file to cut holes into.
    """

    tasks: tuple[Task, ...]
    limit: int = 200
    seed: int = 0
    before: int = 2000
    after: int = 1000
    typed: bool = False
    max_tokens: int | None = None
    suffixes: tuple[str, ...] = DEFAULT_SUFFIXES
    shortest: int = 0


class WindowCost(msgspec.Struct, frozen=True):
    """Prompt tokens that one hole's requests compute with one window.

    Attributes:
        opened: of the first request, with the caret at the end of the line before the hole's.
        moved: of the next one, with the caret at the hole.
        typed: of the next one, after a word was typed there.
    """

    opened: int
    moved: int
    typed: int


class ProblemRecord(msgspec.Struct, frozen=True):
    """A problem in a report; see ``Problem``."""

    id: str
    task: Task
    group: str
    digest: str


class LineEvidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first line of an answer that has text, and how sure the model is of it.

    Attributes:
        right: whether it is exactly the hole's.
        characters: its length.
        estimate, start, line: see ``AnswerEvidence``.
    """

    right: bool
    characters: int
    estimate: float | None = None
    start: Features | None = None
    line: Features | None = None


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one problem in one condition.

    Attributes:
        answer: the model's text.
        ended: whether the answer ended by itself.
        scores: name -> 0 to 1: those of ``score_answer`` and, where the problem has a test,
            "pass" and "pass_first_line".
        verdict: how the answer's program ended; "" where the problem has no test.
        cost: what the condition's window costs at this hole; None where it has no window.
        empty_probability: see ``Answer``; None where the condition has no threshold.
        evidence: of its first line, where the condition is judged.
    """

    answer: str
    ended: bool
    scores: dict[str, float]
    verdict: str = ""
    cost: WindowCost | None = None
    empty_probability: float | None = None
    evidence: LineEvidence | None = None


class InfillingReport(msgspec.Struct, frozen=True, kw_only=True):
    """All results of a run.

    Attributes:
        model: the model and what computed its answers.
        fingerprint: digest of the model's weights; "" for one behind a URL.
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
    fingerprint: str = ""
    format: int = 1


def load_problems(
    options: RunOptions, humaneval: Path | None, files: Sequence[Path]
) -> list[Problem]:
    """Load the problems of a run, grouped by task.

    Args:
        options: of the run.
        humaneval: the data folder of HumanEval-Infilling, if given.
        files: source files, and folders of them.

    Raises:
        MidfillError: a task's data is missing.
    """
    sources = read_files(files, options.suffixes) if files else []
    if sources and not (
        sources := [file for file in sources if len(file.text) >= options.shortest]
    ):
        raise MidfillError(f"no file has {options.shortest} characters")
    problems: list[Problem] = []
    for task in options.tasks:
        if task in PUBLIC_TASKS:
            if humaneval is None:
                raise MidfillError(f"task {task} needs --humaneval FOLDER: {HOW_TO_GET_IT}")
            found = load_humaneval(humaneval, task)
            problems += sample_problems(found, options.limit, options.seed)
        elif task in FILE_TASKS or task in CARET_TASKS:
            if not sources:
                raise MidfillError(f"task {task} needs --files: source files to cut holes into")
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
    earlier: InfillingReport | None = None,
) -> InfillingReport:
    """Ask every problem in every condition and score the answers.

    Problems are asked in batches, each in all conditions at once, so that the engine is never
    short of work and what their prompts share is computed once.

    Args:
        model: the model to evaluate.
        problems: from ``load_problems``.
        conditions: from ``choose_conditions``.
        options: of the run.
        progress: called with (task, answers so far, all answers).
        save: called with the report so far after each batch.
        earlier: the report of an interrupted run; its problems are not asked again.

    Raises:
        MidfillError: a prompt is too long, the server failed, the sandbox can't be used, or the
            earlier run was another.
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
            fingerprint=model.fingerprint,
        )
        if earlier is not None:
            report, problems = _resume(earlier, report, problems)
        done = len(report.problems) * len(conditions)
        total = done + len(problems) * len(conditions)
        for batch in _batches(problems, max(1, _BATCH_ANSWERS // len(conditions))):

            def answered(
                count: int, _: int, task: Task = batch[0].task, before: int = done
            ) -> None:
                progress(task, before + count, total)

            answers = _ask(model, batch, conditions, options, answered)
            outcomes = _judge(batch, answers, sandbox)
            _add_outcomes(report, model, batch, conditions, outcomes)
            report.problems.extend(_record(problem) for problem in batch)
            done += len(batch) * len(conditions)
            save(report)
    return report


def _add_outcomes(
    report: InfillingReport,
    model: Model,
    batch: Sequence[Problem],
    conditions: Sequence[Condition],
    outcomes: Sequence[list[Outcome]],
) -> None:
    """Add a batch's outcomes to a report, with what they cost where windows are compared."""
    for condition, found in zip(conditions, outcomes, strict=True):
        if condition.window is not None:
            costs = measure_costs(model, batch, condition.window)
            found = [
                msgspec.structs.replace(outcome, cost=cost)
                for outcome, cost in zip(found, costs, strict=True)
            ]
        report.outcomes[condition.name].extend(found)


def _resume(
    earlier: InfillingReport, fresh: InfillingReport, problems: Sequence[Problem]
) -> tuple[InfillingReport, list[Problem]]:
    """Return an interrupted run's report, and the problems that are left to ask.

    Args:
        earlier: the report.
        fresh: the empty report of the run that continues it.
        problems: all problems of that run.

    Raises:
        MidfillError: the earlier run was another.
    """
    for what, before, now in (
        ("model", earlier.model, fresh.model),
        ("model's weights", earlier.fingerprint, fresh.fingerprint),
        ("options", earlier.options, fresh.options),
        ("conditions", list(earlier.outcomes), list(fresh.outcomes)),
        ("kind of sandbox", earlier.isolation, fresh.isolation),
    ):
        if before != now:
            raise MidfillError(
                f"the earlier run can't be resumed: its {what} differ from this run's;"
                f" name another --json file (earlier: {before}; now: {now})"
            )
    known = {record.id: record for record in earlier.problems}
    wanted = [_record(problem) for problem in problems]
    if any(record != known.get(record.id, record) for record in wanted) or not (
        known.keys() <= {record.id for record in wanted}
    ):
        raise MidfillError("the earlier run can't be resumed: its holes are of other files or data")
    return earlier, [problem for problem in problems if problem.id not in known]


def _record(problem: Problem) -> ProblemRecord:
    return ProblemRecord(problem.id, problem.task, problem.group, problem.digest)


def _batches(problems: Sequence[Problem], size: int) -> Iterator[list[Problem]]:
    """Yield the problems in batches, each of one task."""
    for _, group in groupby(problems, key=lambda problem: problem.task):
        same = list(group)
        for start in range(0, len(same), size):
            yield same[start : start + size]


def _ask(
    model: Model,
    problems: Sequence[Problem],
    conditions: Sequence[Condition],
    options: RunOptions,
    progress: StageProgress,
) -> list[list[Answer]]:
    """Return, for each condition, one answer per problem."""
    prompt_options = PromptOptions(
        before=options.before,
        after=options.after,
        typed=options.typed,
        seed=options.seed,
        keeps_tokens=model.keeps_tokens,
    )
    # Condition by condition: when a problem's turn comes again, its prefix is in the cache.
    prompts = [
        ModelPrompt(
            make_prompt(condition, model.format, problem, prompt_options),
            condition.healing,
            problem.group,
            condition.empty_threshold,
            condition.method,
            condition.judged,
            condition.candidates,
        )
        for condition in conditions
        for problem in problems
    ]
    limit = max_tokens(problems[0].task, options.max_tokens)
    # Conditions can make the same prompt, as different cuts do of a short prefix.
    unique = list(dict.fromkeys(prompts))
    spared = len(prompts) - len(unique)
    given = model.answer(unique, limit, lambda done, _: progress(spared + done, len(prompts)))
    found = dict(zip(unique, given, strict=True))
    answers = [found[prompt] for prompt in prompts]
    return [answers[at : at + len(problems)] for at in range(0, len(answers), len(problems))]


def _judge(
    problems: Sequence[Problem], answers: Sequence[Sequence[Answer]], sandbox: Sandbox | None
) -> list[list[Outcome]]:
    """Score answers, and run the programs they complete; ``answers`` are by condition."""
    programs = [[_programs(*pair) for pair in zip(problems, row, strict=True)] for row in answers]
    verdicts: dict[Program, str] = {}
    if sandbox is not None:
        # Conditions often give the same answer, and an answer of one line is its own first line.
        unique = list(
            dict.fromkeys(program for row in programs for made in row for program in made.values())
        )
        found = sandbox.run(unique)
        verdicts = {program: verdict.reason for program, verdict in zip(unique, found, strict=True)}
    return [
        [_outcome(*each, verdicts) for each in zip(problems, row, made, strict=True)]
        for row, made in zip(answers, programs, strict=True)
    ]


def _outcome(
    problem: Problem, answer: Answer, made: dict[str, Program], verdicts: dict[Program, str]
) -> Outcome:
    passed = {name: float(verdicts[program] == "passed") for name, program in made.items()}
    return Outcome(
        answer=answer.text,
        ended=answer.ended,
        scores=passed | score_answer(problem, answer),
        verdict=verdicts[made["pass"]] if made else "",
        empty_probability=answer.empty_probability,
        evidence=_line_evidence(problem, answer),
    )


def _line_evidence(problem: Problem, answer: Answer) -> LineEvidence | None:
    if (found := answer.confidence) is None:
        return None
    line = first_text_line(answer.text)
    return LineEvidence(
        line == first_text_line(problem.hole),
        len(line.strip()),
        found.estimate,
        found.start,
        found.line,
    )


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


def measure_costs(model: Model, problems: Sequence[Problem], rule: WindowRule) -> list[WindowCost]:
    """Count what every hole's requests compute with a window of its whole document."""
    costs: list[WindowCost] = []
    for start in range(0, len(problems), _COST_BATCH):
        batch = problems[start : start + _COST_BATCH]
        steps = zip(*(_requests(problem, rule) for problem in batch), strict=True)
        counts = [model.count_computed(step) for step in steps]
        costs += [WindowCost(*found) for found in zip(*counts, strict=True)]
    return costs


def _requests(problem: Problem, rule: WindowRule) -> list[InfillRequest]:
    """Return the requests of a document that is opened, moved in, and typed in."""
    text, caret = problem.prefix + problem.suffix, len(problem.prefix)
    line = text.rfind("\n", 0, caret) + 1
    above = line - 1 if line else text.find("\n", caret) + 1 or len(text)
    typed = problem.prefix + _TYPED, problem.suffix
    # No other request has this tenant, so nothing of the document is cached when it is opened.
    tenant = f"{problem.id} {rule.before}/{rule.after} costs"
    return [
        InfillRequest(prefix=prefix, suffix=suffix, window=rule, tenant=tenant)
        for prefix, suffix in ((text[:above], text[above:]), (text[:caret], text[caret:]), typed)
    ]
