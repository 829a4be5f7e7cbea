"""Loads that an engine runs again and again, and the clocks that tell where its time goes."""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from midfill.config import ModelOptions
from midfill.engine.engine import Engine
from midfill.engine.loading import load_engine
from midfill.engine.messages import EngineInfo
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.errors import MidfillError
from midfill.kernels.cpu.clock import ticks_per_second
from midfill.models.checkpoints.model_store import resolve, resolve_adapter
from midfill.models.checkpoints.opening import open_model
from midfill.runners.cpu.runner import CpuRunner
from midfill_lab.bench.roofline.work import Rows

_WARM_UP_REPEATS = 50


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine does repeatedly.

    Attributes:
        name: shown in tables.
        streams: requests at once.
        context: tokens per request that are cached before.
        rows: tokens to compute per request and repeat; 1 decodes.
        prompt: tokens of a new prompt that is computed beside the streams while they decode, from
            the same context each time; a repeat takes from its arrival to its first token. 0 for
            none.
        repeats: how often it is measured.
    """

    name: str
    streams: int = 1
    context: int
    rows: int = 1
    prompt: int = 0
    repeats: int

    @property
    def decodes(self) -> bool:
        """Whether its streams decode."""
        return self.rows == 1

    @property
    def tokens(self) -> int:
        """Tokens of the KV pool that it needs at most, but for what answers add."""
        return self.streams * (self.context + self.rows) + self.prompt


class Reading(NamedTuple):
    """Clocks of an engine, or the time of one repeat by them.

    Attributes:
        busy: seconds in steps.
        forward: seconds in the runner.
        sampling: seconds in the sampler.
        steps: how many.
        phases: float64 [phases], seconds in each phase of the kernels, the mean over threads.
    """

    busy: float
    forward: float
    sampling: float
    steps: float
    phases: npt.NDArray[np.float64]

    def since(self, earlier: "Reading", repeats: int) -> "Reading":
        """Return the time of one repeat."""
        return Reading(
            (self.busy - earlier.busy) / repeats,
            (self.forward - earlier.forward) / repeats,
            (self.sampling - earlier.sampling) / repeats,
            (self.steps - earlier.steps) / repeats,
            (self.phases - earlier.phases) / repeats,
        )


Spend = Callable[[int], Reading]
"""Runs so many repeats and returns the time of one."""


@dataclass(frozen=True)
class LoadedEngine:
    """A model on the CPU kernels, without speculation.

    Attributes:
        bench: runs loads on it.
        runner: runs its steps.
        info: what it reports of itself.
    """

    bench: "LoadBench"
    runner: CpuRunner
    info: EngineInfo


@contextmanager
def open_engine(
    model: str, threads: int | None, progress: Callable[[str], None]
) -> Iterator[LoadedEngine]:
    """Load a model and warm it up; it is closed at the end.

    Args:
        model: a path or a name.
        threads: that it runs on; None is one per core.
        progress: called with what is being done.

    Raises:
        MidfillError: the model can't be found, loaded, or run by the CPU kernels.
    """
    progress(f"loading {model}")
    options = ModelOptions(backend="cpu", threads=threads, speculation=False)
    checkpoint = open_model(resolve(model), resolve_adapter(model, None), options.weights)
    engine, runner, info = load_engine(checkpoint, options)
    assert isinstance(runner, CpuRunner)
    try:
        bench = LoadBench(engine, runner)
        warm_up = Load(name="warm-up", context=16, repeats=_WARM_UP_REPEATS)
        with bench.running(warm_up) as spend:
            spend(warm_up.repeats)
        yield LoadedEngine(bench, runner, info)
    finally:
        runner.close()


class LoadBench:
    """Runs loads on an engine and reads its clocks."""

    def __init__(self, engine: Engine, runner: CpuRunner) -> None:
        self._engine = engine
        self._runner = runner
        self._tick_rate = ticks_per_second()
        self._random = random.Random(0)
        self._numbers = itertools.count()
        self._steps = 0

    @contextmanager
    def running(self, load: Load) -> Iterator[Spend]:
        """Yield what runs repeats of a load, ``load.repeats`` in all; its requests end with it.

        Raises:
            MidfillError: a stream ended before.
        """
        prompts = [self._tokens(load.context) for _ in range(load.streams)]
        self._cache(prompts)
        if not load.decodes:
            yield lambda repeats: self._extend(load, prompts, repeats)
        elif load.prompt:
            yield lambda repeats: self._prefill_beside(load, prompts, repeats)
        else:
            with self._streaming(load, prompts):
                yield self._decode

    @staticmethod
    def answer_tokens(load: Load) -> int:
        """Return how many tokens each stream of a load may answer."""
        if not load.decodes:
            return 1
        # The first streams answer while the last ones begin, and at most one token of a prompt
        # beside them is computed in each step.
        return load.streams + (load.prompt or load.repeats) + 1

    def _cache(self, prompts: list[list[int]]) -> None:
        """Compute prompts, so that who asks with them again continues at once."""
        for prompt in prompts:
            if prompt:
                self._ask(prompt, 1)
        self._finish()

    @contextmanager
    def _streaming(self, load: Load, prompts: list[list[int]]) -> Iterator[None]:
        """Have streams answer cached prompts, from when all have their first token."""
        names = [self._ask(prompt, self.answer_tokens(load)) for prompt in prompts]
        begun: set[str] = set()
        while len(begun) < load.streams:
            begun.update(self._step())
        yield
        if not self._step().issuperset(names):
            raise MidfillError(f"{load.name}: an answer ended before the measurement did")
        for name in names:
            self._engine.cancel(name)
        self._finish()

    def _decode(self, repeats: int) -> Reading:
        """Run steps that give every stream one token."""
        before = self._read()
        for _ in range(repeats):
            self._step()
        return self._read().since(before, repeats)

    def _prefill_beside(self, load: Load, prompts: list[list[int]], repeats: int) -> Reading:
        """Compute new prompts while streams decode, which begin anew with each."""
        spent = []
        for _ in range(repeats):
            with self._streaming(load, prompts):
                before = self._read()
                name = self._ask(self._tokens(load.prompt), 1)
                while name not in self._step():
                    pass
                spent.append(self._read().since(before, 1))
        return Reading(*(sum(clocks) / repeats for clocks in zip(*spent, strict=True)))

    def _extend(self, load: Load, prompts: list[list[int]], repeats: int) -> Reading:
        """Run requests whose cached prompts grow by tokens that are new each time."""
        before = self._read()
        for _ in range(repeats):
            for prompt in prompts:
                self._ask(prompt + self._tokens(load.rows), 1)
            self._finish()
        return self._read().since(before, repeats)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(100, self._runner.config.vocab) for _ in range(count)]

    def _ask(self, prompt: list[int], tokens: int) -> str:
        name = str(next(self._numbers))
        sampling = EngineSamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self._engine.add(EngineRequest(request_id=name, token_ids=prompt, sampling=sampling))
        return name

    def _step(self) -> set[str]:
        """Run a step and return the requests that got tokens."""
        self._steps += 1
        return {output.request_id for output in self._engine.step()}

    def _finish(self) -> None:
        while self._engine.has_work():
            self._step()

    def _read(self) -> Reading:
        stats = self._engine.stats()
        phases = self._runner.phase_ticks().mean(axis=0) / self._tick_rate
        return Reading(
            stats.busy_seconds,
            stats.forward_seconds,
            stats.sampling_seconds,
            self._steps,
            phases,
        )


def steps_of(load: Load, done: int, repeats: int, steps: int) -> list[list[Rows]]:
    """Return the steps of the middle one of some repeats, each with the rows that it computes.

    Args:
        load: what runs.
        done: repeats before these.
        repeats: how many.
        steps: that a repeat takes; a prompt beside streams is cut into as many equal parts, and
            other prompts are taken as one.
    """
    if not load.decodes:
        return [[Rows(load.streams, load.context, load.rows)]]
    if not load.prompt:
        return [[Rows(load.streams, load.context + done + (repeats - 1) // 2)]]
    cuts = [load.prompt * number // steps for number in range(steps + 1)]
    return [
        [
            Rows(load.streams, load.context + number),
            Rows(1, start, end - start, outputs=int(end == load.prompt)),
        ]
        for number, (start, end) in enumerate(itertools.pairwise(cuts))
    ]
