"""load_engine: a checkpoint to an engine that is ready for requests."""

import time

from midfill.checkpoints.checkpoint import ADAPTER_KEY, Checkpoint
from midfill.config import ModelOptions
from midfill.engine.engine import Engine, EngineOptions
from midfill.engine.messages import EngineInfo
from midfill.engine.step_cost import MeasuredStepCost
from midfill.forward.runner import Runner
from midfill.runners.loading import describe_runner, load_runner
from midfill.system.progress import Progress


def load_engine(
    checkpoint: Checkpoint,
    options: ModelOptions,
    progress: Progress | None = None,
    started: float | None = None,
) -> tuple[Engine, Runner, EngineInfo]:
    """Load the model and build its engine.

    Args:
        started: ``time.perf_counter()`` when loading began; None is now.

    Raises:
        MidfillError: the checkpoint or the options can't be used.
    """
    started = time.perf_counter() if started is None else started
    runner = load_runner(checkpoint, options, progress)
    engine = Engine(
        runner,
        checkpoint.tokenizer.eos_token_ids,
        EngineOptions(
            token_budget=options.token_budget,
            max_running=options.max_running,
            context=options.context,
        ),
        token_bytes=checkpoint.tokenizer.token_bytes,
        step_cost=MeasuredStepCost() if options.speculation else None,
    )
    info = EngineInfo(
        backend=describe_runner(runner),
        layers=runner.config.layers,
        weight_bytes=runner.weight_bytes,
        kv_bytes=runner.kv_bytes,
        slots=runner.slots,
        context=min(options.context or runner.config.context, runner.slots),
        load_seconds=time.perf_counter() - started,
        adapter=str(name) if (name := checkpoint.metadata.get(ADAPTER_KEY)) is not None else None,
    )
    return engine, runner, info
