"""CountingRunner: a runner that counts the work of its forward passes."""

from typing import Any

import msgspec

from midfill.arrays import Float32Array
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.batch import ForwardBatch

_LAYER_MATRICES = ("qkv", "o", "gate", "up", "down")  # of a model without experts


class Work(msgspec.Struct, kw_only=True):
    """What forward passes did, counted.

    Attributes:
        weight_bytes: weights read: those of a layer, or the head, once per call that runs it.
        rows: rows that ran, per layer.
        keys_read: keys that a request's rows attend to, once per call and layer.
        key_pairs: pairs of a row and a key that it attends to, per layer.
    """

    weight_bytes: int = 0
    rows: list[int] = msgspec.field(default_factory=list)
    keys_read: int = 0
    key_pairs: int = 0

    @property
    def row_layers(self) -> int:
        """Rows times the layers that they ran through."""
        return sum(self.rows)


class CountingRunner:
    """A runner that counts what its forward passes do.

    Attributes:
        work: what they have done.
    """

    def __init__(self, runner: CpuRunner) -> None:
        self._runner = runner
        self.restart()
        matrices = runner.model.matrices
        stored = {name: matrix.stored_bytes for name, matrix in matrices.items()}
        layers = sum(stored[name] for name in _LAYER_MATRICES if name in stored)
        self._layer_bytes = layers // runner.config.layers
        self._head_bytes = stored["head"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def restart(self) -> None:
        """Count from 0."""
        self.work = Work(rows=[0] * self._runner.config.layers)

    def forward(self, batch: ForwardBatch) -> Float32Array:
        """See ``Runner.forward``."""
        self._count(batch, 0, self._runner.config.layers)
        self.work.weight_bytes += self._head_bytes
        return self._runner.forward(batch)

    def run_layers(
        self, batch: ForwardBatch, hidden: Float32Array, first: int, end: int
    ) -> Float32Array:
        """See ``Runner.run_layers``."""
        self._count(batch, first, end)
        return self._runner.run_layers(batch, hidden, first, end)

    def compute_logits(self, batch: ForwardBatch, hidden: Float32Array) -> Float32Array:
        """See ``Runner.compute_logits``."""
        self.work.weight_bytes += self._head_bytes
        return self._runner.compute_logits(batch, hidden)

    def _count(self, batch: ForwardBatch, first: int, end: int) -> None:
        seen, layers = batch.keys_seen(), end - first
        for layer in range(first, end):
            self.work.rows[layer] += batch.rows
        self.work.weight_bytes += self._layer_bytes * layers
        self.work.key_pairs += round(float(seen.sum()) * layers)
        self.work.keys_read += round(float(seen[batch.query_indptr[1:] - 1].sum()) * layers)
