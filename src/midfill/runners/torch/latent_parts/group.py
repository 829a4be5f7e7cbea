"""PartGroup: how the parts of latent attention exchange what they have computed."""

import datetime
import os
import sys
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed

_TIMEOUT = datetime.timedelta(minutes=10)
"""Of an exchange; a part that has died is noticed at once."""


class PartGroup(Protocol):
    """The parts, each of which calls the same functions in the same order.

    Attributes:
        rank: the part's number.
        size: how many there are.
    """

    rank: int
    size: int

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of all parts' tensors, the same bits in each; may change ``values``."""

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return all parts' tensors, which have one shape, by rank."""


class ProcessGroup:
    """Implements ``PartGroup`` for processes of one machine: Gloo on CPUs, NCCL on GPUs.

    Args:
        folder: where the processes find each other; empty, and nobody else's.
        rank, size: see ``PartGroup``.
        device: where the tensors are.

    Attributes:
        sums, gathers: how many were made.
    """

    def __init__(self, folder: Path, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self.sums = self.gathers = 0
        path = str(folder / "store")
        store = distributed.FileStore(path, size)  # type: ignore[attr-defined]
        self._group: Any  # torch's types don't know what these classes inherit
        if device.type == "cuda":
            torch.cuda.set_device(device)
            options = distributed.ProcessGroupNCCL.Options()
            self._group = distributed.ProcessGroupNCCL(store, rank, size, options)
        else:
            # Without this, Gloo listens on the address of the machine's name.
            loopback = "lo0" if sys.platform == "darwin" else "lo"
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
            self._group = distributed.ProcessGroupGloo(store, rank, size, _TIMEOUT)
        self._group.allreduce([torch.zeros(1, device=device)]).wait()  # all have come

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """See ``PartGroup.sum``."""
        self.sums += 1
        values = values.contiguous()
        self._group.allreduce([values]).wait()
        return values

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """See ``PartGroup.gather``."""
        self.gathers += 1
        values = values.contiguous()
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        self._group.allgather([gathered], [values]).wait()
        return gathered
