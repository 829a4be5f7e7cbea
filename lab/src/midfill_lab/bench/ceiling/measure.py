"""Measure loads and the machine in turn, and bound each load by what the machine could do then.

Ceilings of a machine that others share move within minutes. So each round of a load stands between
two measurements of the machine, and is compared with the better of them.
"""

import os
from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from midfill.system.machine import describe_machine
from midfill_lab.bench.ceiling.changes import find_crossovers, moved_bounds, moved_bytes
from midfill_lab.bench.ceiling.results import CeilingOptions, CeilingReport, LoadCeiling, Spread
from midfill_lab.bench.engine_loads import Load, LoadBench, LoadedEngine, open_engine, steps_of
from midfill_lab.bench.neighbours import Neighbours
from midfill_lab.bench.roofline.bounds import StepBound, bound_steps
from midfill_lab.bench.roofline.ceilings import Resource, Roofline, RooflineProbe
from midfill_lab.bench.roofline.work import ModelSize, model_size, step_work

Bounds = Callable[[Roofline], StepBound]


def measure_ceiling(
    model: str,
    options: CeilingOptions,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> CeilingReport:
    """Load a model on the CPU kernels, without speculation, and measure each load.

    Args:
        model: a path or a name.
        options: what is measured.
        threads: that the model runs on; None is one per core.
        progress: called with what is being done.

    Raises:
        MidfillError: the model can't be found, loaded, or run by the CPU kernels.
        OptionError: a prompt or a context is longer than the model's.
    """
    load_average, neighbours = os.getloadavg()[0], Neighbours()
    with open_engine(model, threads, progress) as engine:
        options.check(engine.info.context)
        size = model_size(engine.runner)
        progress("trying ways to read memory")
        probe = RooflineProbe(engine.runner.threads)
        sizes = moved_bytes(size, options)
        found, rooflines = [], [probe.measure(sizes)]
        try:
            for phase, load in options.loads():
                progress(load.name)
                if _fits(load, engine):
                    run = _Run(engine.bench, probe, size, options, load)
                    ceiling = run.measure(phase)
                    rooflines += run.rooflines
                else:
                    ceiling = _unmeasured(phase, load, size, rooflines[-1])
                found.append(ceiling)
            rooflines.append(probe.measure(sizes))
        finally:
            probe.close()
    best = reduce(Roofline.best, rooflines)
    return CeilingReport(
        model=Path(model).stem if Path(model).is_file() else model,
        machine=describe_machine(),
        engine=engine.info,
        options=options,
        roofline=best,
        loads=found,
        moved=moved_bounds(size, best, options, engine.info.kv_bytes),
        crossovers=find_crossovers(size, best, engine.info.context),
        load_average=load_average,
        others=neighbours.share(),
    )


def _fits(load: Load, engine: LoadedEngine) -> bool:
    """Whether a load has room in the KV pool and in the model's context."""
    answers = LoadBench.answer_tokens(load)
    if load.decodes and load.context + answers >= engine.info.context:
        return False
    return load.tokens + load.streams * answers <= engine.info.slots


def _unmeasured(phase: str, load: Load, size: ModelSize, roofline: Roofline) -> LoadCeiling:
    steps = steps_of(load, 0, 1, 1)
    bound = bound_steps([step_work(size, rows) for rows in steps], roofline)
    return LoadCeiling(phase=phase, load=load, tokens=_tokens(load, 1), bound=bound)


def _tokens(load: Load, steps: float) -> float:
    """Return the tokens that one repeat of so many steps computes."""
    return load.prompt + load.streams * (steps if load.decodes else load.rows)


class _Run:
    """One load, measured between measurements of the machine."""

    def __init__(
        self,
        bench: LoadBench,
        probe: RooflineProbe,
        size: ModelSize,
        options: CeilingOptions,
        load: Load,
    ) -> None:
        self._bench, self._probe, self._size = bench, probe, size
        self._options, self._load = options, load
        self.rooflines: list[Roofline] = []
        self._passes: list[float] = []

    def measure(self, phase: str) -> LoadCeiling:
        """Run all rounds of the load."""
        load, repeats = self._load, self._options.repeats(self._load)
        seconds, steps, bounds = [], [], []
        with self._bench.running(load) as spend:
            self._look(0)
            for number in range(self._options.rounds):
                spent = spend(repeats)
                seconds.append(spent.busy)
                steps.append(spent.steps)
                done = number * repeats
                bounds.append(self._bounds(done, repeats, max(round(spent.steps), 1)))
                self._look(done)
        pairs = [first.best(second) for first, second in pairwise(self.rooflines)]
        reached = [
            bound(roofline).seconds / taken
            for bound, roofline, taken in zip(bounds, pairs, seconds, strict=True)
        ]
        middle = len(bounds) // 2
        bound = bounds[middle](reduce(Roofline.best, self.rooflines))
        reads = load.decodes and not load.prompt and bound.resource is Resource.MEMORY
        plain = [
            fmean(both) / taken for both, taken in zip(pairwise(self._passes), seconds, strict=True)
        ]
        return LoadCeiling(
            phase=phase,
            load=load,
            tokens=_tokens(load, steps[middle]),
            bound=bound,
            seconds=Spread.of(seconds),
            reached=Spread.of(reached),
            of_plain_read=Spread.of(plain) if reads else None,
        )

    def _bounds(self, done: int, repeats: int, steps: int) -> Bounds:
        """Return what bounds a round of the load under some ceilings."""
        works = [step_work(self._size, rows) for rows in steps_of(self._load, done, repeats, steps)]
        return lambda roofline: bound_steps(works, roofline)

    def _look(self, done: int) -> None:
        """Measure the machine, reading also as many bytes as a step of the load does."""
        work = step_work(self._size, steps_of(self._load, done, 1, 1)[0])
        size = int(sum(part.bytes for part in work))
        self.rooflines.append(self._probe.measure([size]))
        self._passes.append(self._probe.pass_seconds(size))
