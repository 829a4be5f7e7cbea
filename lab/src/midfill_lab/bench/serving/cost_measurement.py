"""What steps cost on this machine: the engine runs prompts and answers, and each step is timed."""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from midfill.arrays import RunnerArray
from midfill.config import ModelOptions
from midfill.engine.engine import Engine
from midfill.engine.loading import load_engine
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.runner import Runner
from midfill.system.machine import describe_machine
from midfill_lab.bench.serving.step_costs import StepCosts, StepSample, StepWork, fit_costs

_PROMPTS = (4, 12, 24, 48, 100, 180, 300, 1000)
_SEQUENCES = (1, 2, 4, 8, 16, 32)
_CONTEXTS = (32, 600)
_MAX_TOKENS = 3000  # of all sequences that decode at once
_DECODED = 6  # tokens of an answer
_REPEATS = 2
_SCHEDULER = "prefill-first"
"""Runs whole prompts: others would cut them, on a slow machine into few rows only."""
_WARM_UP = (64, 8)  # tokens of a prompt and its answer


class WorkRecorder:
    """A runner that notes what its last forward pass had to do."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._work: StepWork | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: ForwardBatch) -> RunnerArray:
        """See ``Runner.forward``."""
        self._work = StepWork.of(batch)
        return self._runner.forward(batch)

    def take_work(self) -> StepWork | None:
        """Return what the pass since the last call had to do; None where none ran in one piece."""
        work, self._work = self._work, None
        return work


def measure_costs(
    checkpoint: Checkpoint,
    name: str,
    options: ModelOptions,
    progress: Callable[[str], None] = lambda _: None,
) -> StepCosts:
    """Measure what steps of a model cost: ten seconds for the default one on two idle cores.

    Args:
        checkpoint: the model.
        name: of the model, for the report.
        options: how it is run; drafts, methods and its scheduler are left out.
        progress: called with what is being done.

    Raises:
        MidfillError: the model can't be loaded.
    """
    progress(f"loading {name}")
    options = msgspec.structs.replace(
        options, speculation=False, method="none", scheduler=_SCHEDULER
    )
    engine, runner, info = load_engine(checkpoint, options, wrap=WorkRecorder)
    recorder = engine._runner
    assert isinstance(recorder, WorkRecorder)
    try:
        samples = list(_samples(engine, recorder, progress))
    finally:
        close = getattr(runner, "close", None)
        if close is not None:
            close()
    fitted = fit_costs(samples)
    return StepCosts(
        model=name,
        machine=describe_machine(),
        engine=info.backend,
        slots=info.slots,
        slot_bytes=info.kv_bytes // info.slots,
        **fitted._asdict(),
    )


def _samples(
    engine: Engine, recorder: WorkRecorder, progress: Callable[[str], None]
) -> Iterator[StepSample]:
    """Run steps of many sizes; yield each with its time."""
    vocabulary, longest = recorder.config.vocab, engine.context - _DECODED - 1
    rng, numbers = random.Random(0), itertools.count()

    def request(prompt: int, answer: int) -> EngineRequest:
        return EngineRequest(
            request_id=f"{next(numbers)}",
            token_ids=[rng.randrange(vocabulary) for _ in range(min(prompt, longest))],
            sampling=EngineSamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True),
        )

    list(_timed_steps(engine, recorder, [request(*_WARM_UP)]))
    for repeat in range(_REPEATS):
        progress(f"measuring steps with prompts, run {repeat + 1} of {_REPEATS}")
        for prompt in _PROMPTS:
            yield from _timed_steps(engine, recorder, [request(prompt, 1)])
        progress(f"measuring steps of answers, run {repeat + 1} of {_REPEATS}")
        for context, sequences in itertools.product(_CONTEXTS, _SEQUENCES):
            if context * sequences <= min(_MAX_TOKENS, recorder.slots // 2):
                batch = [request(context, _DECODED) for _ in range(sequences)]
                yield from _timed_steps(engine, recorder, batch)


def _timed_steps(
    engine: Engine, recorder: WorkRecorder, requests: Sequence[EngineRequest]
) -> Iterator[StepSample]:
    """Answer requests; yield the steps whose forward pass ran in one piece."""
    for request in requests:
        engine.add(request)
    while engine.has_work():
        started = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - started
        work = recorder.take_work()
        if work is not None:
            yield StepSample(work, seconds)
