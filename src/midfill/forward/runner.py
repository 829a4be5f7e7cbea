"""Runner: the engine's view of a model. It owns the weights and the KV cache of all slots."""

from typing import Protocol

import torch

from midfill.forward.batch import ForwardBatch
from midfill.models.config import ModelConfig


class Runner(Protocol):
    """Runs forward passes over packed batches.

    A runner holds the KV of ``slots`` slots and knows nothing about requests: the engine decides
    which slots a row reads and writes.

    Attributes:
        config: the model's shapes.
    """

    config: ModelConfig

    @property
    def slots(self) -> int:
        """Number of tokens whose KV fits."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Size of the KV cache of all slots, in bytes."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Size of the weights in memory, in bytes."""
        ...

    @property
    def description(self) -> str:
        """What runs the model, in words: "CPU kernels, 2 threads"."""
        ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Write K and V of the batch to its slots; return logits [outputs, vocab] float32.

        The next call may overwrite the returned tensor.
        """
        ...
