"""Evaluation pages: a TOML file names runs, and the sections of a document that show them.

    page = "evaluation.md"              # beside the TOML file

    [runs.adapter]                      # a run of 'midfill eval infilling'; see RunPlan
    tasks = ["single-line"]
    conditions = ["auto"]

    [runs.base]
    adapter = "none"
    tasks = ["single-line"]
    conditions = ["prefix-only+healing"]

    [sections.humaneval]                # tables of one run, or
    run = "adapter"

    [sections.base]                     # of two runs, paired by hole
    compare = ["base", "adapter"]
    pairs = ["prefix-only+healing=auto"]

Every run is kept as a JSON file, so an interrupted page continues where it stopped.
"""

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from midfill.config import WeightsOption
from midfill.errors import MidfillError
from midfill.infill.window import WindowRule
from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from midfill.system.progress import Progress
from midfill_lab.evaluation.conditions import Condition, choose_conditions, parse_conditions
from midfill_lab.evaluation.cuts import choose_cut, cut_conditions, parse_distance
from midfill_lab.evaluation.empties import (
    EMPTY_CONDITIONS,
    choose_empty,
    empty_conditions,
    given_empty,
)
from midfill_lab.evaluation.evaluate import InfillingReport, RunOptions, evaluate, load_problems
from midfill_lab.evaluation.models import Model, ModelChoice, load_model
from midfill_lab.evaluation.problems import CARET_TASKS, FILE_TASKS, Problem, Task, check_file_tasks
from midfill_lab.evaluation.report import (
    comparison_tables,
    read_report,
    report_tables,
    write_report,
)
from midfill_lab.evaluation.summary import compare_reports
from midfill_lab.evaluation.windows import (
    choose_window,
    parse_windows,
    window_conditions,
    window_name,
)
from midfill_lab.reporting import replace_section

_SUFFIXES = {"python": (".py",), "javascript": (".js",)}


class RunPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run; fields that it leaves out have the defaults of ``midfill eval infilling``.

    Attributes:
        tasks: kinds of holes.
        conditions: names of conditions; none take all that apply to the model.
        distances: distances of ``midfill eval cuts`` instead of conditions.
        windows: windows of ``midfill eval windows`` instead of conditions.
        empty: whether it has the conditions of ``midfill eval empty``.
        model, adapter, weights: the model; adapter "none" is the base model.
        files: which of the held-out files.
        limit: holes per task; 0 takes all.
        seed, context_characters, typed, max_tokens, shortest: see ``RunOptions``.
    """

    tasks: tuple[Task, ...]
    conditions: tuple[str, ...] = ()
    distances: tuple[int | Literal["whole"], ...] = ()
    windows: tuple[str, ...] = ()
    empty: bool = False
    model: str = DEFAULT_MODEL
    adapter: str | None = None
    weights: WeightsOption = "auto"
    files: Literal["python", "javascript"] = "python"
    limit: int = 200
    seed: int = 0
    context_characters: tuple[int, int] = (2000, 1000)
    typed: bool = False
    max_tokens: int | None = None
    shortest: int = 0

    def options(self, limit: int | None) -> RunOptions:
        """Return the run's options; ``limit`` replaces the plan's own."""
        before, after = self.context_characters
        return RunOptions(
            tasks=self.tasks,
            limit=self.limit if limit is None else limit,
            seed=self.seed,
            before=before,
            after=after,
            typed=self.typed,
            max_tokens=self.max_tokens,
            suffixes=_SUFFIXES[self.files],
            shortest=self.shortest,
        )

    def choose_conditions(self, model: Model) -> tuple[Condition, ...]:
        """Return the conditions to measure.

        Raises:
            MidfillError: one is unknown or doesn't apply to the model.
        """
        if self.distances:
            return cut_conditions(self._distances(), model.format)
        if self.windows:
            return window_conditions(self._windows())
        if self.empty:
            return empty_conditions(model.format)
        return choose_conditions(self.conditions or None, model.format)

    def check(self) -> None:
        """Check the names of the conditions.

        Raises:
            MidfillError: one is unknown, or there is more than one kind of them.
        """
        kinds = (self.conditions, self.distances, self.windows, self.empty)
        if sum(map(bool, kinds)) > 1:
            raise MidfillError(
                "it has several of conditions, distances, windows and empty; only one can be"
                " measured"
            )
        if self.distances:
            self._distances()
        if self.windows:
            self._windows()
            check_file_tasks(self.tasks, "its documents are too short for windows")
        if self.conditions:
            parse_conditions(",".join(self.conditions))

    @property
    def condition_names(self) -> set[str] | None:
        """Names of what is measured; None if that depends on the model."""
        if self.windows:
            return {window_name(rule) for rule in self._windows()}
        if self.empty:
            return {condition.name for condition in EMPTY_CONDITIONS}
        return set(map(str, self.distances or self.conditions)) or None

    def _distances(self) -> tuple[int, ...]:
        return tuple(sorted({parse_distance(str(distance)) for distance in self.distances}))

    def _windows(self) -> tuple[WindowRule, ...]:
        return parse_windows(",".join(self.windows))


class SectionPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section: the tables of ``run``, ``compare``, ``cuts``, ``windows`` or ``empty``.

    Attributes:
        run: name of a run.
        compare: names of two runs, paired by hole.
        pairs: conditions to compare, as in "prefix-only=psm"; none compare each with itself.
        cuts, windows, empty: name of a run with distances, with windows, with empty.
        score, margin: what cut and window are chosen by, see ``choice``; the margin is in points.
        threshold: of empty answers, to be reported; None chooses one.
    """

    run: str | None = None
    compare: tuple[str, str] | None = None
    pairs: tuple[str, ...] = ()
    cuts: str | None = None
    windows: str | None = None
    empty: str | None = None
    score: str = "similarity"
    margin: float = 2.0
    threshold: float | None = None

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the runs that it shows."""
        single = (self.run, self.cuts, self.windows, self.empty)
        return (*(name for name in single if name is not None), *(self.compare or ()))

    def markdown(self, reports: Mapping[str, InfillingReport]) -> str:
        """Return its tables.

        Raises:
            MidfillError: the reports can't be compared.
        """
        if self.run is not None:
            return report_tables(reports[self.run]).markdown()
        if self.cuts is not None:
            report = reports[self.cuts]
            chosen = choose_cut(report, score=self.score, margin=self.margin / 100)
            return chosen.tables().markdown()
        if self.windows is not None:
            report = reports[self.windows]
            chosen = choose_window(report, score=self.score, margin=self.margin / 100)
            return chosen.tables().markdown()
        if self.empty is not None:
            report = reports[self.empty]
            if self.threshold is None:
                return choose_empty(report).tables().markdown()
            return given_empty(report, self.threshold).tables().markdown()
        assert self.compare is not None
        first, second = (reports[name] for name in self.compare)
        comparisons = compare_reports(first, second, self.parsed_pairs())
        models = f"First: {first.model}; second: {second.model}. "
        return comparison_tables(comparisons, models).markdown()

    def parsed_pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of conditions.

        Raises:
            MidfillError: one has no "=".
        """
        pairs = [tuple(pair.split("=")) for pair in self.pairs]
        if not all(len(pair) == 2 and all(pair) for pair in pairs):
            raise MidfillError("its pairs must be like prefix-only=psm")
        return [(pair[0], pair[1]) for pair in pairs]


class PagePlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A document's runs and sections.

    Attributes:
        page: name of the document, in the TOML file's folder.
        runs, sections: by name; a section's name is that of its marks in the document.
    """

    page: str
    runs: dict[str, RunPlan]
    sections: dict[str, SectionPlan]


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """Where a page's data and results are.

    Attributes:
        humaneval: the data folder of HumanEval-Infilling.
        held_out: folder that ``python -m benchmarks held-out`` has filled.
        results: folder of the runs' JSON files.
        limit: replaces the limit of every run, for a quick look.
        choice: how models are run; its model and weights are the plan's. Its adapter replaces the
            default adapter, not "none".
    """

    humaneval: Path | None
    held_out: Path | None
    results: Path
    limit: int | None
    choice: ModelChoice


def read_page(path: Path) -> PagePlan:
    """Read a page's TOML file.

    Raises:
        MidfillError: it can't be read, or something in it is wrong.
    """
    try:
        plan = msgspec.convert(tomllib.loads(path.read_text("utf-8")), PagePlan)
    except OSError as error:
        raise MidfillError(f"{path}: can't be read: {error.strerror}") from None
    except (ValueError, msgspec.ValidationError) as error:  # bad TOML and UTF-8 are ValueErrors
        raise MidfillError(f"{path}: {error}") from None
    for name, run in plan.runs.items():
        try:
            run.check()
        except MidfillError as error:
            raise MidfillError(f"{path}: run {name}: {error}") from None
    for name, section in plan.sections.items():
        _check_section(f"{path}: section {name}", section, plan.runs)
    return plan


def measure_page(
    plan: PagePlan,
    document: Path,
    options: PageOptions,
    sections: Iterable[str],
    progress: Progress,
    written: Callable[[str], None],
) -> None:
    """Run what some sections need, and write each section once its runs are complete.

    Args:
        plan: the page.
        document: the document.
        options: data and results.
        sections: names of the sections.
        progress: called with (run and task, answers so far, all answers).
        written: called with the name of each section that was written.

    Raises:
        MidfillError: data is missing, a model can't be loaded, or results are of another run.
    """
    reports: dict[str, InfillingReport] = {}
    for name in sections:
        section = plan.sections[name]
        for run in section.runs:
            if run not in reports:
                reports[run] = _measure(run, plan.runs[run], options, progress)
        replace_section(document, name, section.markdown(reports))
        written(name)


def _check_section(where: str, section: SectionPlan, runs: Mapping[str, RunPlan]) -> None:
    kinds = (section.run, section.compare, section.cuts, section.windows, section.empty)
    if sum(each is not None for each in kinds) != 1:
        raise MidfillError(f"{where} must have one of run, compare, cuts, windows and empty")
    for run in section.runs:
        if run not in runs:
            raise MidfillError(f"{where} names run {run}; there are {', '.join(runs)}")
    if section.cuts is not None and len(runs[section.cuts].distances) < 2:
        raise MidfillError(f"{where}: run {section.cuts} has no distances to choose from")
    if section.windows is not None and not runs[section.windows].windows:
        raise MidfillError(f"{where}: run {section.windows} has no windows")
    if section.empty is not None and not runs[section.empty].empty:
        raise MidfillError(f"{where}: run {section.empty} is not of empty answers")
    try:
        section.parsed_pairs()
    except MidfillError as error:
        raise MidfillError(f"{where}: {error}") from None


def _measure(name: str, plan: RunPlan, options: PageOptions, progress: Progress) -> InfillingReport:
    """Return the report of a run: from its file, as far as it is there."""
    path = options.results / f"{name}.json"
    asked = plan.options(options.limit)
    problems = load_problems(asked, options.humaneval, _files(plan, options))
    choice = _choice(plan, options.choice)
    earlier = read_report(path) if path.exists() else None
    if (
        earlier is not None
        and _is_complete(earlier, plan, problems, asked)
        and earlier.fingerprint == choice.fingerprint()
    ):
        return earlier

    def report_progress(stage: str, done: int, total: int) -> None:
        progress(f"{name}: {stage}", done, total)

    def save(report: InfillingReport) -> None:
        write_report(report, path, finished=False)

    with load_model(choice, progress) as model:
        conditions = plan.choose_conditions(model)
        try:
            report = evaluate(model, problems, conditions, asked, report_progress, save, earlier)
        except MidfillError as error:
            raise MidfillError(f"run {name} ({path}): {error}") from None
    write_report(report, path, finished=True)
    return report


def _is_complete(
    report: InfillingReport, plan: RunPlan, problems: Iterable[Problem], asked: RunOptions
) -> bool:
    """Return whether a report has what a run asks for, apart from the model."""
    known = {record.id: record.digest for record in report.problems}
    return (
        report.options == asked
        and plan.condition_names in (None, set(report.outcomes))
        and all(known.get(problem.id) == problem.digest for problem in problems)
    )


def _choice(plan: RunPlan, choice: ModelChoice) -> ModelChoice:
    adapter = choice.adapter if plan.adapter is None else plan.adapter
    return replace(choice, model=plan.model, weights=plan.weights, adapter=adapter)


def _files(plan: RunPlan, options: PageOptions) -> list[Path]:
    if not any(task in (*FILE_TASKS, *CARET_TASKS) for task in plan.tasks):
        return []
    if options.held_out is None:
        raise MidfillError(
            "name the held-out files with --files FOLDER; 'python -m benchmarks held-out FOLDER'"
            " fetches them"
        )
    return [options.held_out / plan.files]
