"""Experts as gpt-oss's safetensors files hold them: all of a layer in one tensor, gate beside up.

Of each expert, outputs of gate and up follow in turn. Unquantised matrices are transposed:
[experts, inputs, outputs]. In MXFP4 there are two tensors of bytes in the place of one: ``_blocks``
[experts, outputs, blocks, 16] and ``_scales`` [experts, outputs, blocks], a block being 32 inputs.
Biases are [experts, outputs].
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from midfill.errors import CheckpointError
from midfill.models.checkpoints.safetensors_file import SafetensorsEntry
from midfill.stored_tensor import StoredTensor

_STACKED = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<part>gate_up|down)_proj(?P<leaf>_blocks|_scales|_bias|)"
)
_GROUP = 32
_DIMENSIONS = {"": 3, "_bias": 2, "_blocks": 4}

Read = Callable[[SafetensorsEntry], npt.NDArray[np.generic]]


@dataclass(frozen=True)
class ExpertEntry:
    """One expert's part of what files hold of all of a layer's experts.

    Attributes:
        stacked: of all experts.
        exponents: of MXFP4; None for other kinds.
        expert: number of the expert.
        first, step: which outputs: from which one on, and how far apart.
        shape: of the part, outputs first.
    """

    stacked: SafetensorsEntry
    exponents: SafetensorsEntry | None
    expert: int
    first: int
    step: int
    shape: tuple[int, ...]

    @property
    def file(self) -> Path:
        """The file that holds it."""
        return self.stacked.file

    @property
    def kind(self) -> str:
        """See ``StoredTensor.kind``."""
        return self.stacked.kind if self.exponents is None else "mxfp4"

    def tensor(self, name: str, read: Read) -> StoredTensor:
        """Return the tensor, whose data are views of what ``read`` returns of an entry."""
        data: npt.NDArray[Any] = read(self.stacked)[self.expert]
        if len(self.stacked.shape) == 3:
            data = data.T
        data = data[self.first :: self.step]
        if self.exponents is None:
            return StoredTensor(name, self.shape, self.kind, data)
        exponents: npt.NDArray[Any] = read(self.exponents)[self.expert, self.first :: self.step]
        return StoredTensor(name, self.shape, "mxfp4", data, exponents)


def split_interleaved(
    entries: Mapping[str, SafetensorsEntry],
) -> dict[str, SafetensorsEntry | ExpertEntry]:
    """Give each expert's matrices and biases entries of their own.

    Raises:
        CheckpointError: a tensor of bytes has another shape than the format asks for, or lacks its
            scales.
    """
    split: dict[str, SafetensorsEntry | ExpertEntry] = {}
    for name, entry in entries.items():
        stacked = _STACKED.fullmatch(name)
        if stacked is None:
            split[name] = entry
            continue
        leaf = stacked["leaf"]
        if leaf == "_scales":
            continue
        if len(entry.shape) != _DIMENSIONS[leaf] or 0 in entry.shape:
            raise CheckpointError(
                f"{entry.file}: tensor {name!r} of shape {list(entry.shape)} isn't that of all "
                "experts"
            )
        exponents = _find_scales(name, entry, entries) if leaf == "_blocks" else None
        parts = ("gate", "up") if stacked["part"] == "gate_up" else ("down",)
        shape = _expert_shape(entry, leaf, len(parts))
        for number in range(entry.shape[0] * len(parts)):
            expert, first = divmod(number, len(parts))
            module = f"{stacked['experts']}.{expert}.{parts[first]}_proj"
            split[f"{module}.{'bias' if leaf == '_bias' else 'weight'}"] = ExpertEntry(
                entry, exponents, expert, first, len(parts), shape
            )
    return split


def _expert_shape(entry: SafetensorsEntry, leaf: str, parts: int) -> tuple[int, ...]:
    """Return the shape of one expert's part, outputs first."""
    if leaf == "_bias":
        return (entry.shape[1] // parts,)
    if leaf == "_blocks":
        return (entry.shape[1] // parts, entry.shape[2] * _GROUP)
    return (entry.shape[2] // parts, entry.shape[1])


def _find_scales(
    name: str, blocks: SafetensorsEntry, entries: Mapping[str, SafetensorsEntry]
) -> SafetensorsEntry:
    theirs = f"{name.removesuffix('_blocks')}_scales"
    scales = entries.get(theirs)
    if scales is None:
        raise CheckpointError(f"{blocks.file}: tensor {theirs!r} is missing")
    if blocks.shape[3] != _GROUP // 2 or scales.shape != blocks.shape[:3]:
        raise CheckpointError(
            f"{blocks.file}: tensors {name!r} of shape {list(blocks.shape)} and {theirs!r} of "
            f"shape {list(scales.shape)} aren't MXFP4's blocks and their scales"
        )
    if {blocks.kind, scales.kind} != {"u8"}:
        raise CheckpointError(f"{blocks.file}: tensors {name!r} and {theirs!r} must be U8")
    return scales
