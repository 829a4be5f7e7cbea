"""What the engine's process tells the processes of the other parts, and how it is sent."""

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

from midfill.arrays import Float32Array
from midfill.config import WeightsOption
from midfill.runners.forward.batch import ForwardBatch


@dataclass(frozen=True)
class PartShape:
    """What all parts have in common.

    Attributes:
        parts: how many there are.
        slots: of each one's KV cache.
        device: "cpu", or "cuda": part i is on "cuda:i".
        dtype: of weights and KV.
        threads: of the CPU, per part.
    """

    parts: int
    slots: int
    device: str
    dtype: torch.dtype
    threads: int

    def device_of(self, rank: int) -> torch.device:
        """Return a part's device."""
        return torch.device(self.device if self.device == "cpu" else f"{self.device}:{rank}")


@dataclass(frozen=True)
class Load:
    """Load a model, and reply None, or the message of a MidfillError.

    Attributes:
        path, adapter, weights: see ``open_model``.
        shape: of all parts.
        folder: where the processes find each other.
    """

    path: Path
    adapter: Path | None
    weights: WeightsOption
    shape: PartShape
    folder: Path


@dataclass(frozen=True)
class Run:
    """Run layers first <= i < end; there is no reply.

    Attributes:
        batch: the rows.
        hidden: [rows, hidden] as layer first - 1 left them; None are embeddings.
        first, end: the layers.
    """

    batch: ForwardBatch
    hidden: Float32Array | None
    first: int
    end: int


@dataclass(frozen=True)
class CellCall:
    """Call a function of the part's ``TorchCells``, and reply what it returns.

    Attributes:
        name: of the function.
        arguments: its arguments.
    """

    name: Literal["read", "write", "take", "put", "dump", "restore"]
    arguments: tuple[Any, ...]


def send(connection: Connection, message: object) -> None:
    """Send a message. Tensors are copied into it; nothing is shared."""
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """Return the next message.

    Raises:
        EOFError: the other end has closed.
    """
    return pickle.loads(connection.recv_bytes())
