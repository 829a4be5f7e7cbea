"""What answers gain from text that is far from the caret, and what showing it costs.

Carets are those of ``far_carets``. Each is asked with several windows of its document (for
``imported``, with the model's own window and so many more characters of the files that it imports),
all keys being read, and with the widest once more by each method that reads a part of them. The
planner lays prompts out as for a user who goes through each file from its beginning to its end, so
that much of each prompt is cached. At the first ``far`` caret of some files, the time that a first
prompt takes, with nothing cached, and that of the next one, after a word is typed, are measured.
"""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from midfill.errors import MidfillError, OptionError
from midfill.frontend.prompt import Prompt
from midfill.frontend.prompt_encoder import PromptEncoder
from midfill.infill.request import InfillRequest
from midfill.infill.window import WindowRule
from midfill.methods.registry import OFF, resolve_method
from midfill.system.machine import describe_machine
from midfill.system.progress import Progress
from midfill_lab.evaluation.conditions import required
from midfill_lab.evaluation.far_carets import FAR_KINDS, FarCaret, FarCarets, FarKind
from midfill_lab.evaluation.metrics import is_exact_first_line
from midfill_lab.evaluation.reuse_session import ReuseSession
from midfill_lab.evaluation.source_files import DEFAULT_SUFFIXES, SourceFile, read_files
from midfill_lab.evaluation.windows import parse_windows, window_name

DEFAULT_WINDOWS = "2000/600,7400/600,15400/600,23400/600"
DEFAULT_METHODS = "lserve:budget=512 hip:k=512,window=256"


class FarOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked; the same options give the same prompts.

    Attributes:
        windows: such as "2000/600", the smallest first: that is the one that lacks the names.
        methods: specifications, each asked with the widest window.
        kinds: of carets; of ``any`` there are some in files that have others.
        limit: maximum number of carets of each kind.
        per_file: maximum number of them in one file.
        timed: files in which times are measured.
        seed: all chance follows from it.
        max_tokens: of an answer; it ends with its line.
        shortest, longest: characters of the shortest and the longest file.
    """

    windows: tuple[str, ...]
    methods: tuple[str, ...] = ()
    kinds: tuple[FarKind, ...] = FAR_KINDS
    limit: int = 200
    per_file: int = 4
    timed: int = 6
    seed: int = 0
    max_tokens: int = 48
    shortest: int = 8000
    longest: int = 32_000


class FarAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer.

    Attributes:
        text: its first line.
        right: whether that is the file's.
        named: whether the name is in it.
        tokens: of the prompt.
    """

    text: str
    right: bool
    named: bool
    tokens: int


class FarRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A caret and its answers.

    Attributes:
        id, group, digest: see ``Problem``.
        kind, name, distance: see ``FarCaret``.
        answers: by condition.
    """

    id: str
    group: str
    digest: str
    kind: FarKind
    name: str
    distance: int
    answers: dict[str, FarAnswer]


class FarTime(msgspec.Struct, frozen=True, kw_only=True):
    """Processor time of one caret's prompts with one condition.

    Attributes:
        tokens: of the prompt.
        cold, typed: seconds to the first token, with nothing cached and after a word was typed. A
            method whose prompts are computed with all keys takes what the window takes without it.
        step_seconds: of all steps after the first token, both times.
        steps: how many these are.
    """

    condition: str
    tokens: int
    cold: float
    typed: float
    step_seconds: float
    steps: int


class FarReport(msgspec.Struct, frozen=True, kw_only=True):
    """All results of a run.

    Attributes:
        model: the model and what computed its answers.
        fingerprint: digest of what decides its answers.
        machine: where it ran.
        load: other work on the machine when it began (the system's load average).
        options: of the run.
        lines: of the files asked in, how many have a place of each kind.
        carets: in order.
        times: in order.
        done: files that are finished.
        format: version of this record.
    """

    model: str
    fingerprint: str
    machine: str
    load: float
    options: FarOptions
    lines: dict[FarKind, int]
    carets: list[FarRecord]
    times: list[FarTime]
    done: list[str]
    format: int = 1


@dataclass(frozen=True)
class FarCondition:
    """A window, and how its keys are read.

    Attributes:
        window: what is shown of the document; of ``imported`` files what it has more than the
            smallest window.
        method: the specification of a method, or "off".
    """

    window: WindowRule
    method: str = OFF

    @property
    def name(self) -> str:
        """As tables name it."""
        shown = window_name(self.window)
        return shown if self.method == OFF else f"{shown}, {self.method}"


def far_conditions(windows: Sequence[str], methods: Sequence[str]) -> tuple[FarCondition, ...]:
    """Return the conditions, the one with the smallest window first.

    Raises:
        MidfillError: fewer than two windows are named, or a method is none.
    """
    rules = parse_windows(",".join(windows))
    for method in methods:
        resolve_method(method)
    plain = [FarCondition(rule) for rule in rules]
    return (*plain, *(FarCondition(rules[-1], method) for method in methods))


@dataclass(frozen=True)
class FarFile:
    """A file and its carets, by their places."""

    name: str
    carets: Sequence[FarCaret]
    lines: dict[FarKind, int]


def load_far_files(paths: Sequence[Path], options: FarOptions) -> list[FarFile]:
    """Return the files of a run, and the carets in them.

    Args:
        paths: source files, and folders of them.
        options: of the run.

    Raises:
        MidfillError: there are no such files, or no name in them comes from far away.
    """
    found = read_files(paths, DEFAULT_SUFFIXES)
    shortest, longest = options.shortest, options.longest
    if not any(shortest <= len(file.text) <= longest for file in found):
        raise MidfillError(
            f"no file has {shortest:,} to {longest:,} characters: see --shortest and --longest"
        )
    return draw_far_files(found, options)


def draw_far_files(files: Sequence[SourceFile], options: FarOptions) -> list[FarFile]:
    """Draw carets in as many files as it takes, see ``load_far_files``."""
    near = far_conditions(options.windows, ())[0].window
    finder = FarCarets(files, near)
    order = [file for file in files if options.shortest <= len(file.text) <= options.longest]
    random.Random(f"{options.seed}/far").shuffle(order)
    left = dict.fromkeys(FAR_KINDS, options.limit)
    drawn = []
    for file in order:
        carets: list[FarCaret] = []
        for kind in options.kinds:
            wanted = min(options.per_file, left[kind])
            own = finder.draw(file, kind, wanted, options.seed)
            if kind == "any" and not carets and len(options.kinds) > 1:
                break  # a file without far names tells nothing of them
            left[kind] -= len(own)
            carets += own
        if carets:
            carets.sort(key=lambda caret: len(caret.problem.prefix))
            drawn.append(FarFile(file.name, carets, finder.count_lines(file)))
    if not drawn:
        raise OptionError("--files: no line of them uses a name that is set far away")
    return drawn


def measure_far(
    session: ReuseSession,
    model: str,
    files: Sequence[FarFile],
    options: FarOptions,
    progress: Progress,
    save: Callable[[FarReport], None],
    earlier: FarReport | None = None,
) -> FarReport:
    """Ask all carets with every condition.

    Args:
        session: the model.
        model: its name.
        files: see ``load_far_files``.
        options: of the run.
        progress: called with (stage, carets so far, all carets).
        save: called with the report so far after each file.
        earlier: the report of an interrupted run; its files are not asked again.

    Raises:
        MidfillError: the model has no FIM tokens, a method doesn't suit it, or the earlier run was
            another.
    """
    required(session.format)
    report = FarReport(
        model=f"{model}, {session.backend}",
        fingerprint=session.fingerprint,
        machine=str(describe_machine()),
        load=os.getloadavg()[0],
        options=options,
        lines=dict.fromkeys(FAR_KINDS, 0),
        carets=[],
        times=[],
        done=[],
    )
    if earlier is not None:
        report = _resumed(earlier, report, files)
    total = sum(len(file.carets) for file in files)
    conditions = far_conditions(options.windows, options.methods)
    for method in options.methods:  # one that doesn't suit the model is refused now
        session.find_method(method)
    for number, file in enumerate(files):
        if file.name in report.done:
            continue
        found: list[FarRecord] = []
        for record in _asked(session, file, conditions, options.max_tokens):
            found.append(record)
            progress("carets", len(report.carets) + len(found), total)
        if number < options.timed:
            report.times.extend(_timed(session, file, conditions, options.max_tokens))
        report.carets.extend(found)
        report.done.append(file.name)
        for kind, lines in file.lines.items():
            report.lines[kind] += lines
        save(report)
    return report


def _resumed(earlier: FarReport, fresh: FarReport, files: Sequence[FarFile]) -> FarReport:
    """Return an interrupted run's report.

    Raises:
        MidfillError: the earlier run was another.
    """
    for what, before, now in (
        ("model", earlier.model, fresh.model),
        ("model's weights", earlier.fingerprint, fresh.fingerprint),
        ("options", earlier.options, fresh.options),
    ):
        if before != now:
            raise MidfillError(
                f"the earlier run can't be resumed: its {what} differ from this run's;"
                f" name another --json file (earlier: {before}; now: {now})"
            )
    wanted = {caret.problem.id: caret.problem.digest for file in files for caret in file.carets}
    if any(wanted.get(caret.id) != caret.digest for caret in earlier.carets):
        raise MidfillError("the earlier run can't be resumed: its carets are in other files")
    return earlier


def _request(caret: FarCaret, condition: FarCondition, small: WindowRule) -> InfillRequest:
    """Return what a client sends; files take what a window has more than the smallest one."""
    problem, window = caret.problem, condition.window
    files = caret.files if window != small else ()
    more = window.before + window.after - small.before - small.after
    return InfillRequest(
        prefix=problem.prefix,
        suffix=problem.suffix,
        document=problem.group,
        window=small if caret.kind == "imported" else window,
        context_files=files,
        context_characters=more if files else None,
    )


def _asked(
    session: ReuseSession, file: FarFile, conditions: Sequence[FarCondition], max_tokens: int
) -> Iterator[FarRecord]:
    """Yield the carets of a file with their answers."""
    small = conditions[0].window
    tenant = session.tenant_who_asked(())
    # Each has a planner of its own, to which the document is known from its other carets.
    encoders: dict[tuple[FarKind, WindowRule], PromptEncoder] = {}
    for caret in file.carets:
        prompts: dict[WindowRule, Prompt] = {}
        answers: dict[str, FarAnswer] = {}
        for condition in conditions:
            window = condition.window
            if window not in prompts:
                key = (caret.kind, window)
                if key not in encoders:
                    encoders[key] = session.encoder(window)
                prompts[window] = encoders[key].infill(_request(caret, condition, small))
            prompt = prompts[window]
            measured = session.ask(prompt, condition.method, tenant, max_tokens)
            answers[condition.name] = FarAnswer(
                text=measured.answer,
                right=is_exact_first_line(measured.answer, caret.problem.hole),
                named=caret.name in measured.answer,
                tokens=len(prompt.token_ids),
            )
        problem = caret.problem
        yield FarRecord(
            id=problem.id,
            group=problem.group,
            digest=problem.digest,
            kind=caret.kind,
            name=caret.name,
            distance=caret.distance,
            answers=answers,
        )


def _timed(
    session: ReuseSession, file: FarFile, conditions: Sequence[FarCondition], max_tokens: int
) -> Iterator[FarTime]:
    """Yield the times of the last caret of a file whose name is far away."""
    carets = [caret for caret in file.carets if caret.kind == "far"]
    if not carets:
        return
    problem = carets[-1].problem
    typed = problem.hole[: len(carets[-1].name)]
    tenants = {one.window: session.tenant_who_asked(()) for one in conditions}
    exact: dict[WindowRule, list[float]] = {}
    for condition in conditions:
        encoder, found = session.encoder(condition.window), []
        for more in ("", typed):
            request = InfillRequest(
                prefix=problem.prefix + more, suffix=problem.suffix, document=problem.group
            )
            prompt = encoder.infill(request)
            tenant = tenants[condition.window]
            found.append(session.ask(prompt, condition.method, tenant, max_tokens))
        seconds = [one.ttft_processor_seconds for one in found]
        if found[0].cached_tokens:  # the exact prompt's KV
            seconds = exact.get(condition.window, seconds)
        exact.setdefault(condition.window, seconds)
        yield FarTime(
            condition=condition.name,
            tokens=len(prompt.token_ids),
            cold=seconds[0],
            typed=seconds[1],
            step_seconds=sum(one.steps_processor_seconds for one in found),
            steps=sum(one.steps for one in found),
        )


def read_far(path: Path) -> FarReport:
    """Read a report from JSON.

    Raises:
        MidfillError: the file can't be read or is not a report.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=FarReport)
    except OSError as error:
        raise MidfillError(f"{path} can't be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise MidfillError(f"{path} is not a report of 'midfill eval far': {error}") from None
