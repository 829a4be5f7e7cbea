"""Keystrokes beside other work, and what drafts cost: what a larger model makes of both.

An engine's steps are timed in this process. A keystroke is a request whose prompt is cached but
for a few tokens. It arrives in the middle of a step, as an editor's would, and is timed from there
to its first token. Drafts are judged by their cost alone: how long a step takes that verifies so
many tokens, beside one that decodes. How often drafts are right depends on the text.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import typer

from benchmarks.cpu_model import open_cpu_model
from benchmarks.report import publish
from benchmarks.shapes.command import ShapeOption, model_or_shape
from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.progress import show_steps
from midfill.config import ModelOptions
from midfill.engine.engine import Engine, EngineOptions
from midfill.engine.loading import scheduler_policy, step_limit
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.engine.scheduling.policies.background_prefill import BackgroundPrefill
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.batch import ForwardBatch
from midfill.system.machine import Machine, describe_machine, format_size
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

DRAFTS = (1, 2, 4, 8, 16)
_TYPED = 6
_OTHERS_SAMPLES = 2  # where every keystroke waits until a long prompt is computed
_WARM_UP_TOKENS = 400  # as many rows as a step limit needs to know what steps cost


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Work that keystrokes arrive beside, and how steps are planned.

    Attributes:
        beside: "nothing", "idle prefill" or "a long prompt".
        plan: "as served", "first come, first served", or "steps of any length".
        uncached: tokens of the keystroke's prompt that are not cached.
    """

    beside: str
    plan: str = "as served"
    uncached: int = _TYPED


CASES = (
    Case(beside="nothing"),
    Case(beside="nothing", uncached=400),
    Case(beside="idle prefill"),
    Case(beside="a long prompt"),
    Case(beside="a long prompt", plan="first come, first served"),
    Case(beside="a long prompt", plan="steps of any length"),
)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What keystrokes took.

    Attributes:
        case: which.
        ttft: seconds to their first tokens, in order of length.
        step: seconds of the steps that they arrived in, the median; 0 where none ran.
    """

    case: Case
    ttft: list[float]
    step: float


class KeystrokesReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        context: tokens of a keystroke's prompt that are cached.
        prompt: tokens of the long prompt.
        weight_bytes: that each step reads.
        load: the machine's load average, the higher of before and after.
        one_row: seconds of a step that decodes one token, the median.
        drafts: by number of drafted tokens, seconds of a step that verifies them, the median.
    """

    model: str
    machine: Machine
    threads: int
    context: int
    prompt: int
    weight_bytes: int
    load: float
    outcomes: list[Outcome]
    one_row: float
    drafts: dict[int, float]


def measure_keystrokes(
    model: str,
    *,
    context: int = 1000,
    prompt: int = 2000,
    keystrokes: int = 20,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> KeystrokesReport:
    """Load ``model`` on the CPU kernels and time keystrokes and drafts.

    Raises:
        MidfillError: the model can't be found, loaded, or run by the CPU kernels.
    """
    with open_cpu_model(model, threads, progress) as loaded:
        runner = loaded.runner
        progress("drafts")
        rows = _time_rows(runner, context, repeats=max(5, keystrokes))
        outcomes = []
        for case in CASES:
            progress(f"keystrokes beside {case.beside}, {case.plan}, {case.uncached} uncached")
            bench = _Bench(runner, loaded.options, case, context, prompt)
            count = _OTHERS_SAMPLES if case.plan == "first come, first served" else keystrokes
            outcomes.append(bench.run(count))
        return KeystrokesReport(
            model=Path(model).stem if Path(model).is_file() else model,
            machine=describe_machine(),
            threads=runner.threads,
            context=context,
            prompt=prompt,
            weight_bytes=runner.weight_bytes,
            load=loaded.load,
            outcomes=outcomes,
            one_row=rows[0],
            drafts={drafted: rows[drafted] for drafted in DRAFTS},
        )


def _time_rows(runner: CpuRunner, context: int, repeats: int) -> dict[int, float]:
    """Return the median seconds of steps by how many tokens they verify beside the first row."""
    times: dict[int, list[float]] = {drafted: [] for drafted in (0, *DRAFTS)}
    for _ in range(repeats):
        for drafted, seconds in times.items():
            batch = _verifying(context, drafted + 1)
            started = time.perf_counter()
            runner.forward(batch)
            seconds.append(time.perf_counter() - started)
    return {drafted: median(seconds) for drafted, seconds in times.items()}


def _verifying(context: int, rows: int) -> ForwardBatch:
    """Return a step of one sequence whose rows all have logits."""
    slots = np.arange(context + rows, dtype=np.int32)
    new = slots[context:]
    ends = np.array([0, rows], np.int32)
    return ForwardBatch(
        token_ids=np.arange(100, 100 + rows, dtype=np.int32),
        positions=new,
        write_slots=new,
        query_indptr=ends,
        kv_indptr=np.array([0, len(slots)], np.int32),
        kv_slots=slots,
        logit_rows=np.arange(rows, dtype=np.int32),
    )


class _Step(NamedTuple):
    """When a step began and ended, and the requests that it gave tokens."""

    started: float
    ended: float
    answered: set[str]


@dataclass
class _Bench:
    """Keystrokes in one case, on an engine of their own over a runner that is shared."""

    runner: CpuRunner
    options: ModelOptions
    case: Case
    context: int
    prompt: int

    def __post_init__(self) -> None:
        policy = scheduler_policy(self.options, self.runner.config.layers)
        if self.case.plan == "first come, first served":
            budget = self.options.step_tokens
            policy = BackgroundPrefill(SarathiServe(budget, self.options.max_running))
        limited = self.case.plan != "steps of any length"
        self._engine = Engine(
            self.runner, (), EngineOptions(), policy=policy,
            step_limit=step_limit(self.options) if limited else None,
        )  # fmt: skip
        self._random = random.Random(0)
        self._numbers = iter(range(10**9))

    def run(self, count: int) -> Outcome:
        """Time ``count`` keystrokes, one after the other."""
        self._ask(self._tokens(_WARM_UP_TOKENS), 8)
        self._finish()
        document = self._tokens(self.context)
        self._ask(document, 1)
        self._finish()
        times, steps = [], []
        for _ in range(count):
            asked = document + self._tokens(self.case.uncached)
            step = self._other_work()
            arrived = time.perf_counter()
            if step is not None:
                steps.append(step.ended - step.started)
                arrived = step.started + self._random.random() * steps[-1]
            name = self._ask(asked, 1)
            times.append(self._until(name) - arrived)
        for name in self._others:
            self._engine.cancel(name)
        self._finish()
        return Outcome(case=self.case, ttft=sorted(times), step=median(steps) if steps else 0.0)

    _others: tuple[str, ...] = ()

    def _other_work(self) -> _Step | None:
        """Run a step of the work that keystrokes arrive beside, and see that there is more."""
        if self.case.beside == "nothing":
            return None
        for name in self._others:  # a new one each time, so that none is nearly done
            self._engine.cancel(name)
        background = self.case.beside == "idle prefill"
        self._others = (self._ask(self._tokens(self.prompt), 1, background),)
        self._step()
        return self._step()

    def _tokens(self, count: int) -> list[int]:
        vocab = self.runner.config.vocab
        return [self._random.randrange(vocab // 2, vocab) for _ in range(count)]

    def _ask(self, tokens: list[int], answer: int, background: bool = False) -> str:
        name = str(next(self._numbers))
        sampling = EngineSamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        self._engine.add(
            EngineRequest(
                request_id=name, token_ids=tokens, sampling=sampling, background=background
            )
        )
        return name

    def _step(self) -> _Step:
        started = time.perf_counter()
        answered = {output.request_id for output in self._engine.step() if output.token_ids}
        return _Step(started, time.perf_counter(), answered)

    def _steps(self) -> Iterator[_Step]:
        while self._engine.has_work():
            yield self._step()

    def _until(self, name: str) -> float:
        """Run steps until a request has a token; return when that was."""
        return next(step.ended for step in self._steps() if name in step.answered)

    def _finish(self) -> None:
        for _ in self._steps():
            pass


def keystrokes_tables(report: KeystrokesReport) -> tuple[ResultTable, ResultTable]:
    """Return a table of keystrokes and one of drafts."""
    keystrokes = ResultTable(
        title="Keystrokes",
        rows=[_keystroke_cells(outcome) for outcome in report.outcomes],
        labels=2,
        caption=(
            f"{report.model}: milliseconds from a keystroke's arrival, in the middle of a step, to"
            f" its first token; {report.context:,} tokens of its prompt are cached. The long"
            f" prompt, and the one of idle prefill, have {report.prompt:,}. Step: the median of"
            " those that keystrokes arrived in."
        ),
    )
    drafts = ResultTable(
        title="Drafts",
        rows=[
            _draft_cells(drafted, seconds, report.one_row)
            for drafted, seconds in report.drafts.items()
        ],
        caption=(
            f"{report.model}: a step that verifies drafted tokens of one sequence, beside one that"
            f" decodes ({report.one_row * 1e3:.1f} ms), at {report.context:,} tokens. Either reads"
            f" {format_size(report.weight_bytes)} of weights. Pays from:"
            " the share of drafted tokens, each as likely right as the others, above which such a"
            f" step yields more tokens per second. Threads: {report.threads}; {report.machine};"
            f" load {report.load:.1f}."
        ),
    )
    return keystrokes, drafts


def _keystroke_cells(outcome: Outcome) -> dict[str, str]:
    times = [seconds * 1e3 for seconds in outcome.ttft]
    return {
        "beside": outcome.case.beside,
        "steps": outcome.case.plan,
        "uncached tokens": f"{outcome.case.uncached}",
        "TTFT ms": f"{median(times):,.0f}",
        "p90": f"{times[min(int(0.9 * len(times)), len(times) - 1)]:,.0f}",
        "step ms": f"{outcome.step * 1e3:,.0f}" if outcome.step else "",
        "keystrokes": str(len(times)),
    }


def _draft_cells(drafted: int, seconds: float, one_row: float) -> dict[str, str]:
    cost = seconds / one_row
    share = break_even(drafted, cost)
    return {
        "drafted": str(drafted),
        "step ms": f"{seconds * 1e3:.1f}",
        "times one row": f"{cost:.2f}",
        "pays from": "never" if share is None else f"{share:.0%}",
    }


def break_even(drafted: int, cost: float) -> float | None:
    """Return from which share of right tokens on a draft pays; None if it can't.

    Args:
        drafted: its tokens. The expected number that a step yields is 1 + p + ... + p^drafted.
        cost: of the step that verifies it, in steps that decode.
    """
    if cost > drafted + 1:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        share = (low + high) / 2
        if sum(share**place for place in range(drafted + 1)) < cost:
            low = share
        else:
            high = share
    return high if high > 1e-3 else 0.0


def keystrokes(
    model: ModelArgument = None,
    shape: ShapeOption = None,
    prompt: Annotated[
        int, typer.Option(min=256, help="Tokens of the long prompt beside which users type.")
    ] = 2000,
    keystrokes: Annotated[int, typer.Option(min=2, help="Of each kind.")] = 20,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure keystrokes beside long prompts and idle prefill, and what drafts cost.

    With --shape, --docs replaces the section of that shape.
    """
    with show_steps("loading") as progress:
        name = model_or_shape(model, shape, progress)
        report = measure_keystrokes(
            name, prompt=prompt, keystrokes=keystrokes, threads=threads, progress=progress
        )
    section = f"keystrokes-{shape}" if shape else "keystrokes"
    publish(report, *keystrokes_tables(report), section=section, json=json, docs=docs)
