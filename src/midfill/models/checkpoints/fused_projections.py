"""Projections that Phi-3's files hold as one: rows of q, k and v, and rows of gate and up."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from midfill.errors import CheckpointError
from midfill.models.checkpoints.safetensors_file import SafetensorsEntry
from midfill.models.config import ModelConfig


def fused_rows(config: ModelConfig) -> dict[str, dict[str, int]]:
    """Return canonical module name -> the modules in it, in order, with their rows."""
    queries, keys = (heads * config.head_dim for heads in (config.query_heads, config.kv_heads))
    return {
        "qkv": {"q": queries, "k": keys, "v": keys},
        "gate_up": {"gate": config.ffn, "up": config.ffn},
    }


def split_fused(
    entries: Mapping[str, SafetensorsEntry], config: ModelConfig
) -> dict[str, SafetensorsEntry]:
    """Give q, k, v, gate and up entries of their own.

    Raises:
        CheckpointError: a fused tensor has another number of rows than these have together.
    """
    fused = {
        f"{module}_proj": {f"{part}_proj": rows for part, rows in parts.items()}
        for module, parts in fused_rows(config).items()
    }
    split = {}
    for name, entry in entries.items():
        path, _, leaf = name.rpartition(".")
        module = path.rpartition(".")[2]
        parts = fused.get(module)
        if parts is None or not entry.shape:
            split[name] = entry
            continue
        rows = sum(parts.values())
        if entry.shape[0] != rows:
            raise CheckpointError(
                f"{entry.file}: tensor {name!r} has {entry.shape[0]} rows, the model's "
                f"configuration asks for {rows}"
            )
        before, at, row_bytes = name.removesuffix(f"{module}.{leaf}"), 0, entry.size // rows
        for part, count in parts.items():
            split[f"{before}{part}.{leaf}"] = replace(
                entry, shape=(count, *entry.shape[1:]), offset=entry.offset + at * row_bytes,
                size=count * row_bytes,
            )  # fmt: skip
            at += count
    return split


def in_key_order(
    rows: npt.NDArray[np.generic], heads: int, rotated: int
) -> npt.NDArray[np.generic]:
    """Return rows of q or k in an order in which all of a head's halves turn, some by nothing.

    Files have a head's rotated numbers first, in two halves. The others go before each half. A
    product of query and key is the same in any order.

    Args:
        rows: [heads * head_dim, ...].
        heads: of them.
        rotated: numbers of a head that are rotated.
    """
    by_head = rows.reshape(heads, -1, *rows.shape[1:])
    half, still = rotated // 2, (by_head.shape[1] - rotated) // 2
    order = [
        *range(rotated, rotated + still), *range(half),
        *range(rotated + still, rotated + 2 * still), *range(half, rotated),
    ]  # fmt: skip
    return np.ascontiguousarray(by_head[:, order]).reshape(rows.shape)
