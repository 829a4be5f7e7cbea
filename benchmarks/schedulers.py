"""Prefill by chunks and by layers beside running answers: times, and the work that is done."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple, cast

import msgspec

from benchmarks.counting_runner import CountingRunner, Work
from midfill.config import ModelOptions, SchedulerName
from midfill.engine.engine import Engine, EngineOptions
from midfill.engine.loading import scheduler_policy
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.lab.bench.cpu_model import open_cpu_model
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.runner import Runner
from midfill.system.machine import Machine, describe_machine
from midfill.system.reporting.result_table import ResultTable

STREAMS = (0, 8)
_STREAM_TOKENS = 64


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A way to prefill a prompt.

    Attributes:
        name: shown in tables.
        scheduler: by chunks or by layers.
        token_budget: maximum tokens of a chunk; groups of layers are as much work.
    """

    name: str
    scheduler: SchedulerName
    token_budget: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What prefilling one prompt took, the median over repeats.

    Attributes:
        case: how it was prefilled.
        streams: answers that were being decoded.
        ttft: seconds to the prompt's first token.
        processor: processor seconds until then.
        longest_gap: seconds, the longest between two tokens of a stream meanwhile; 0 without.
        longest_gap_processor: processor seconds, likewise.
        steps: forward passes.
        work: what they did, the decodes' part included.
    """

    case: Case
    streams: int
    ttft: float
    processor: float
    longest_gap: float
    longest_gap_processor: float
    steps: int
    work: Work


class SchedulerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured."""

    model: str
    machine: Machine
    load: float
    threads: int
    prompt: int
    repeats: int
    outcomes: list[Outcome]


def measure_schedulers(
    model: str,
    *,
    prompt: int = 2000,
    repeats: int = 7,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> SchedulerReport:
    """Load ``model`` on the CPU kernels and prefill prompts in each way, in turn.

    Raises:
        MidfillError: the model can't be found, loaded, or run by the CPU kernels.
    """
    with open_cpu_model(model, threads, progress) as loaded:
        runner = loaded.runner
        bench = _Bench(runner, prompt)
        cases = _cases(prompt, loaded.options.token_budget)
        rounds: dict[tuple[str, int], list[Outcome]] = {}
        for repeat in range(repeats + 1):
            for streams in STREAMS:
                for case in cases:
                    progress(f"repeat {repeat} of {repeats}: {case.name}, {streams} streams")
                    outcome = bench.prefill(case, streams)
                    if repeat:  # the first one warms up
                        rounds.setdefault((case.name, streams), []).append(outcome)
        return SchedulerReport(
            model=model,
            machine=describe_machine(),
            load=loaded.load,
            threads=runner.threads,
            prompt=prompt,
            repeats=repeats,
            outcomes=[_median(outcomes) for outcomes in rounds.values()],
        )


def _cases(prompt: int, budget: int) -> list[Case]:
    return [
        Case(name="by chunks", scheduler="sarathi-serve", token_budget=budget),
        Case(name="by layers", scheduler="layered-prefill", token_budget=budget),
        Case(name="in one step", scheduler="sarathi-serve", token_budget=prompt + max(STREAMS)),
    ]


class _Clock(NamedTuple):
    """Seconds, and processor seconds of all threads."""

    wall: float
    processor: float

    @classmethod
    def read(cls) -> "_Clock":
        return cls(time.perf_counter(), time.process_time())

    def since(self, earlier: "_Clock") -> "_Clock":
        return _Clock(self.wall - earlier.wall, self.processor - earlier.processor)


@dataclass
class _Bench:
    """Prefills prompts of random tokens, new ones each time, so that none is cached."""

    runner: CpuRunner
    prompt: int

    def __post_init__(self) -> None:
        self._random = random.Random(0)

    def prefill(self, case: Case, streams: int) -> Outcome:
        """Prefill one prompt beside streams that decode."""
        counting = CountingRunner(self.runner)
        options = ModelOptions(scheduler=case.scheduler, token_budget=case.token_budget)
        policy = scheduler_policy(options, self.runner.config.layers)
        engine = Engine(cast(Runner, counting), (), EngineOptions(), policy=policy)
        for number in range(streams):
            self._ask(engine, f"stream {number}", _STREAM_TOKENS, 10_000)
        while streams and len(engine.step()) < streams:
            pass
        engine.step()
        counting.restart()
        before = engine.stats().steps
        times = [_Clock.read()]
        self._ask(engine, "prompt", self.prompt, 1)
        while "prompt" not in {output.request_id for output in engine.step()}:
            times.append(_Clock.read())
        times.append(_Clock.read())
        gaps = [later.since(earlier) for earlier, later in pairwise(times)]
        whole = times[-1].since(times[0])
        return Outcome(
            case=case,
            streams=streams,
            ttft=whole.wall,
            processor=whole.processor,
            longest_gap=max(gap.wall for gap in gaps) if streams else 0.0,
            longest_gap_processor=max(gap.processor for gap in gaps) if streams else 0.0,
            steps=engine.stats().steps - before,
            work=counting.work,
        )

    def _ask(self, engine: Engine, name: str, length: int, tokens: int) -> None:
        vocab = self.runner.config.vocab
        prompt = [self._random.randrange(vocab // 2, vocab) for _ in range(length)]
        sampling = EngineSamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        engine.add(EngineRequest(request_id=name, token_ids=prompt, sampling=sampling))


def _median(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the medians of the times; the work is the same in each repeat."""
    times = {
        name: median(getattr(one, name) for one in outcomes)
        for name in ("ttft", "processor", "longest_gap", "longest_gap_processor")
    }
    return msgspec.structs.replace(outcomes[-1], **times)


def scheduler_table(report: SchedulerReport) -> ResultTable:
    """Return the table of a report."""
    return ResultTable(
        rows=[_cells(one) for one in report.outcomes],
        labels=2,
        caption=(
            f"{report.model}: a prompt of {report.prompt:,} tokens, none of them cached, beside"
            f" answers that are being decoded, without speculation; medians of {report.repeats}"
            " runs, in turn. Weights: of a layer, or the head, once per call that runs it. Rows:"
            " times the layers that they run through. Keys: once per request, call and layer."
            f" Threads: {report.threads}; {report.machine}; load {report.load:.1f}."
        ),
    )


def _cells(outcome: Outcome) -> dict[str, str]:
    work = outcome.work
    gap = outcome.streams > 0
    return {
        "prefill": outcome.case.name,
        "decoding": str(outcome.streams),
        "TTFT ms": f"{outcome.ttft * 1e3:,.0f}",
        "processor ms": f"{outcome.processor * 1e3:,.0f}",
        "longest gap ms": f"{outcome.longest_gap * 1e3:,.0f}" if gap else "",
        "its processor ms": f"{outcome.longest_gap_processor * 1e3:,.0f}" if gap else "",
        "steps": str(outcome.steps),
        "weights GB": f"{work.weight_bytes / 1e9:.2f}",
        "rows x layers": f"{work.row_layers:,}",
        "keys read": f"{work.keys_read:,}",
        "row-key pairs": f"{work.key_pairs:,}",
    }
