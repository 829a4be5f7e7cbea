"""LatentPartsRunner: a model whose latents are kept in parts, each by a process of its own.

The engine's process has the first part and tells the others what to run, step by step.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
import torch

from midfill.arrays import Float32Array, Int32Array, RunnerArray
from midfill.config import WeightsOption
from midfill.errors import MidfillError
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.cells import CellLayout, CellStore, StoredCells, UInt8Array
from midfill.runners.torch.latent_parts.calibration import calibrate, calibration_texts
from midfill.runners.torch.latent_parts.messages import (
    CellCall,
    Load,
    PartShape,
    Run,
    receive,
    send,
)
from midfill.runners.torch.latent_parts.rotation import LatentRotation
from midfill.runners.torch.latent_parts.worker import join_parts, part_cells
from midfill.runners.torch.runner import TorchRunner
from midfill.runners.torch.weights import load_weights
from midfill.system.python_child import python_command, python_environment

_END_SECONDS = 5.0


class LatentPartsRunner(TorchRunner):
    """Implements ``runners.forward.runner.Runner`` over several processes.

    A process that has ended, or a step that failed in one of them, ends this one: the parts no
    longer hold the same tokens then. Whoever started the engine starts it again.

    Args:
        checkpoint: the model.
        shape: of the parts.
        adapter, weights: what the checkpoint was opened with, see ``open_model``.

    Attributes:
        group: of the parts; counts what they exchange.
        rotation: how the latents are cut.

    Raises:
        CheckpointError: a tensor can't be read.
        MidfillError: a process can't be started, or can't load the model.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        shape: PartShape,
        adapter: Path | None = None,
        weights: WeightsOption = "auto",
    ) -> None:
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _end, self._workers)
        torch.set_num_threads(shape.threads)
        with _meeting_place() as folder:
            load = Load(checkpoint.path, adapter, weights, shape, folder)
            for rank in range(1, shape.parts):
                self._workers.append(_Worker(rank, load))
            whole = load_weights(checkpoint, shape.device_of(0), shape.dtype)
            config = checkpoint.config
            texts = calibration_texts(checkpoint.tokenizer.encode, config.context)
            self.rotation = calibrate(config, whole, texts, shape.parts)
            for worker in self._workers:
                worker.finish_loading(self.rotation)
            self._part, self.group = join_parts(checkpoint, whole, self.rotation, 0, shape, folder)
        super().__init__(config, self._part)

    def close(self) -> None:
        """End the processes of the other parts."""
        self._finalizer()

    @property
    def kv_bytes(self) -> int:
        return self.decoder.kv_cache.bytes * self.rotation.parts

    @property
    def weight_bytes(self) -> int:
        return self.decoder.weights.bytes * self.rotation.parts

    @property
    def cells(self) -> "PartCells":
        """The KV cache, cell by cell."""
        return PartCells(part_cells(self._part), [worker.connection for worker in self._workers])

    @property
    def description(self) -> str:
        return f"{super().description}, latents in {self.rotation.parts} parts"

    @property
    def build(self) -> str:
        return f"{super().build} {_digest(self.rotation)}"

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> RunnerArray:
        """See ``Runner.forward``."""
        prepared = self.decoder.prepare(batch)
        with self._all_parts(Run(batch, None, 0, self.config.layers)):
            hidden = self.decoder.embed(batch)
            hidden = self.decoder.run_layers(prepared, hidden, 0, self.config.layers)
        return self.compute_logits(batch, hidden)

    @torch.inference_mode()
    def run_layers(
        self, batch: ForwardBatch, hidden: torch.Tensor, first: int, end: int
    ) -> torch.Tensor:
        """See ``Runner.run_layers``."""
        prepared = self.decoder.prepare(batch, first)
        with self._all_parts(Run(batch, hidden.float().cpu().numpy(), first, end)):
            return self.decoder.run_layers(prepared, hidden, first, end)

    @contextmanager
    def _all_parts(self, run: Run) -> Iterator[None]:
        """Have the other parts run the same; end this process where one of them fails."""
        try:
            for worker in self._workers:
                send(worker.connection, run)
            yield
        except Exception as error:
            ended = [worker for worker in self._workers if worker.process.poll() is not None]
            reason = ", ".join(f"part {one.rank} ended ({one.process.returncode})" for one in ended)
            message = f"a step over {self.rotation.parts} parts failed: {reason or error}"
            raise SystemExit(message) from error


class PartCells:
    """Implements ``runners.forward.cells.CellStore``: the cells of all parts.

    An array of a cell is a part's; keys that are read are the parts' keys, one behind the other.

    Args:
        own: of this process's part.
        others: to the processes of the other parts, by rank.
    """

    def __init__(self, own: CellStore, others: Sequence[Connection]) -> None:
        self._own, self._others = own, others

    def read(self, cells: Int32Array) -> tuple[Float32Array, Float32Array]:
        """See ``CellStore.read``."""
        keys = np.concatenate([part for part, _ in self._call("read", cells)], axis=-1)
        return keys, keys

    def read_keys(self, cells: Int32Array) -> Float32Array:
        """See ``CellStore.read_keys``."""
        return self.read(cells)[0]

    def write(self, cells: Int32Array, keys: Float32Array, values: Float32Array) -> None:
        """See ``CellStore.write``."""
        parts = np.split(keys, 1 + len(self._others), axis=-1)
        self._call("write", cells, shared=[(part, part) for part in parts])

    def take(
        self,
        cells: Int32Array,
        shift: Int32Array | None = None,
        layers: Int32Array | None = None,
    ) -> StoredCells:
        """See ``CellStore.take``."""
        parts = self._call("take", cells, shift, layers)
        return StoredCells(tuple(array for part in parts for array in part.arrays))

    def put(self, cells: Int32Array, stored: StoredCells) -> None:
        """See ``CellStore.put``."""
        self._call("put", cells, shared=[(StoredCells((part,)),) for part in stored.arrays])

    @property
    def layout(self) -> CellLayout:
        """See ``CellStore.layout``."""
        layout = self._own.layout
        return CellLayout(layout.dtype, layout.widths * (1 + len(self._others)))

    def dump(self, cells: Int32Array) -> tuple[UInt8Array, ...]:
        """See ``CellStore.dump``."""
        return tuple(array for arrays in self._call("dump", cells) for array in arrays)

    def restore(self, cells: Int32Array, arrays: tuple[UInt8Array, ...]) -> None:
        """See ``CellStore.restore``."""
        self._call("restore", cells, shared=[((array,),) for array in arrays])

    def _call(
        self, name: Any, cells: Int32Array, *further: Any, shared: Sequence[tuple[Any, ...]] = ()
    ) -> list[Any]:
        """Call a function of every part's cells; return what it returns, by rank.

        Args:
            name: of the function.
            cells: its first argument.
            further: its other arguments.
            shared: instead, those of each part.
        """
        arguments = shared or [further] * (1 + len(self._others))
        for connection, own in zip(self._others, arguments[1:], strict=True):
            send(connection, CellCall(name, (cells, *own)))
        mine = getattr(self._own, name)(cells, *arguments[0])
        return [mine, *(receive(connection) for connection in self._others)]


class _Worker:
    """The process of a part, which begins to load.

    Args:
        rank: the part's number.
        load: what it loads.
    """

    def __init__(self, rank: int, load: Load) -> None:
        self.rank = rank
        self.connection, theirs = Pipe()
        module, number = "midfill.runners.torch.latent_parts.worker", theirs.fileno()
        try:
            self.process = subprocess.Popen(
                python_command("-m", module, str(number), str(rank)),
                stdin=subprocess.DEVNULL,
                pass_fds=[number],
                env=python_environment(os.environ),
            )
        except OSError as error:
            reason = error.strerror or error
            raise MidfillError(f"the process of a part can't be started: {reason}") from error
        finally:
            theirs.close()
        send(self.connection, load)

    def finish_loading(self, rotation: LatentRotation) -> None:
        """Wait until it has loaded the model, and tell it how to cut that.

        Raises:
            MidfillError: it couldn't.
        """
        try:
            failure = receive(self.connection)
        except EOFError:
            failure = f"its process ended with status {self.process.wait()}"
        if failure is not None:
            raise MidfillError(f"part {self.rank} of the latents can't be loaded: {failure}")
        send(self.connection, rotation)


@contextmanager
def _meeting_place() -> Iterator[Path]:
    """Give a folder in which processes find each other; it is gone once they have."""
    folder = tempfile.mkdtemp(prefix="midfill-")  # readable by this user only
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        try:
            worker.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            worker.process.kill()


def _digest(rotation: LatentRotation) -> str:
    """Return a digest of what the latents in the KV cache depend on."""
    tensors = (rotation.axes, rotation.shares, rotation.scales)
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]
