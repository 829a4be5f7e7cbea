"""A model on the CPU kernels, loaded into this process to measure an engine's steps."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from midfill.config import ModelOptions
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.model_store import resolve, resolve_adapter
from midfill.models.checkpoints.opening import open_model
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.loading import load_runner


@dataclass(frozen=True)
class CpuModel:
    """The model and what runs it.

    Attributes:
        checkpoint: the model.
        runner: runs it.
        options: how it was loaded, and how it would be served.
        load_before: the machine's load average once it was loaded.
    """

    checkpoint: Checkpoint
    runner: CpuRunner
    options: ModelOptions
    load_before: float

    @property
    def load(self) -> float:
        """The machine's load average, the higher of before and now."""
        return max(self.load_before, os.getloadavg()[0])


@contextmanager
def open_cpu_model(
    model: str, threads: int | None, progress: Callable[[str], None]
) -> Iterator[CpuModel]:
    """Yield a model on the CPU kernels; it is closed at the end.

    Args:
        model: name or path.
        threads: that it runs on; None is one per core.
        progress: called with what is being done.

    Raises:
        MidfillError: the model can't be found, loaded, or run by the CPU kernels.
    """
    progress(f"loading {model}")
    options = ModelOptions(backend="cpu", threads=threads)
    checkpoint = open_model(resolve(model), resolve_adapter(model, None), options.weights)
    runner = load_runner(checkpoint, options)
    assert isinstance(runner, CpuRunner)
    try:
        yield CpuModel(checkpoint, runner, options, os.getloadavg()[0])
    finally:
        runner.close()
