"""Tensors that are some rows of a stored one: Qwen3-Next's files have several in one, by heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from midfill.errors import CheckpointError
from midfill.models.checkpoints.interleaved_experts import Read
from midfill.models.checkpoints.safetensors_file import SafetensorsEntry
from midfill.models.config import DeltaRule, ModelConfig
from midfill.stored_tensor import StoredTensor

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class GatheredEntry:
    """Some rows of a tensor in a safetensors file.

    Attributes:
        stored: the tensor.
        rows: int64, their numbers in it, in order.
    """

    stored: SafetensorsEntry
    rows: Rows

    @property
    def file(self) -> Path:
        """The file that holds them."""
        return self.stored.file

    @property
    def kind(self) -> str:
        """See ``StoredTensor.kind``."""
        return self.stored.kind

    @property
    def shape(self) -> tuple[int, ...]:
        """Their shape."""
        return (len(self.rows), *self.stored.shape[1:])

    def tensor(self, name: str, read: Read) -> StoredTensor:
        """Return the tensor, a copy from what ``read`` returns of an entry."""
        return StoredTensor(name, self.shape, self.kind, read(self.stored)[self.rows])


def gathered_rows(config: ModelConfig) -> dict[str, dict[str, Rows]]:
    """Return canonical name of a stored module -> the modules in it, with their rows.

    A file may have the modules by themselves instead, but for queries and their gates.
    """
    found: dict[str, dict[str, Rows]] = {}
    if config.gated_attention:
        queries, gates = _halves(config.query_heads, config.head_dim)
        found["q"] = {"q": queries, "q_gate": gates}
    rule = config.state_space
    if isinstance(rule, DeltaRule):
        served = rule.heads // rule.key_heads
        sizes = [rule.state_dim, rule.state_dim, *2 * [served * rule.head_dim]]
        by_head = np.arange(rule.key_heads * sum(sizes)).reshape(rule.key_heads, -1)
        parts = np.split(by_head, np.cumsum(sizes)[:-1], axis=1)
        q, k, v, z = (part.ravel() for part in parts)
        found["ssm_qkvz"] = {"ssm_qkv": np.concatenate((q, k, v)), "ssm_gate": z}
        betas, alphas = _halves(rule.key_heads, served)
        found["ssm_ba"] = {"ssm_beta": betas, "ssm_alpha": alphas}
    return found


def _halves(heads: int, size: int) -> tuple[Rows, Rows]:
    """Return the rows of two modules that take turns: of each head, some of both."""
    rows = np.arange(2 * heads * size).reshape(heads, 2, size)
    return rows[:, 0].ravel(), rows[:, 1].ravel()


def check_rows(parts: Mapping[str, Rows], shape: tuple[int, ...], source: str) -> None:
    """Check that a stored tensor has as many rows as the modules in it together.

    Args:
        parts: the modules' rows.
        shape: of the tensor.
        source: names file and tensor.

    Raises:
        CheckpointError: it has more or fewer.
    """
    rows = sum(len(part) for part in parts.values())
    if shape[:1] != (rows,):
        raise CheckpointError(
            f"{source} has shape {list(shape)}, the model's configuration asks for {rows} rows"
        )


def gather(
    entries: Mapping[str, SafetensorsEntry], config: ModelConfig, modules: Mapping[str, str]
) -> dict[str, SafetensorsEntry | GatheredEntry]:
    """Give each module an entry of its own.

    Args:
        entries: by name in the file.
        config: the model.
        modules: the family's, canonical name -> theirs.

    Raises:
        CheckpointError: see ``check_rows``.
    """
    found = {
        f".{modules[module]}.weight": {
            f".{modules[part]}.weight": rows for part, rows in own.items()
        }
        for module, own in gathered_rows(config).items()
        if module in modules
    }
    gathered: dict[str, SafetensorsEntry | GatheredEntry] = {}
    for name, entry in entries.items():
        suffix = next((suffix for suffix in found if name.endswith(suffix)), None)
        if suffix is None:
            gathered[name] = entry
            continue
        check_rows(found[suffix], entry.shape, f"{entry.file}: tensor {name!r}")
        for part, rows in found[suffix].items():
            gathered[f"{name.removesuffix(suffix)}{part}"] = GatheredEntry(entry, rows)
    return gathered
