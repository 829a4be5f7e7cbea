"""The profile of a model for CacheGen: how often each symbol occurs in each layer and channel.

It is computed once per model from a few thousand tokens of source code, in the slots of a runner
that nobody uses yet, and kept in the cache folder.
"""

import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from midfill.kv.ragged import cells_of_slots
from midfill.methods.model_probe import ModelProbe
from midfill.methods.needles import needle_text
from midfill.methods.store.cachegen import (
    CacheGen,
    KvShape,
    UInt16Array,
    count_symbols,
    cumulative_tables,
    quantize,
)
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.runners.forward.runner import Runner
from midfill.system.cache import cache_folder, mark_used, remove_unused, store_file

_log = logging.getLogger(__name__)

_TEXTS, _TOKENS, _WORDS, _SEED = 4, 1000, 8, 7
_VERSION = 1


def load_tables(
    method: CacheGen, shape: KvShape, runner: Runner, tokenizer: Tokenizer, name: str
) -> UInt16Array:
    """Return a model's tables, computed now if they aren't stored.

    Args:
        method: hyper-parameters.
        shape: of the KV.
        runner: the model; its slots are overwritten.
        tokenizer: the model's.
        name: of the model's KV, ``KvIdentity.name``.
    """
    file = f"{name}-cachegen-{method.shallow}-{method.deep}-v{_VERSION}.npy"
    path = cache_folder() / "kv-profiles" / file
    wanted = (2, shape.layers, shape.channels, method.bins + 1)
    tables = _read(path, wanted)
    if tables is None:
        counts = measure_counts(method, shape, runner, tokenizer)
        tables = cumulative_tables(counts, method.layer_bins(shape.layers))
        found = tables
        store_file(path, lambda temporary: _write(temporary, found))
        remove_unused(path.parent)
    mark_used(path)
    return tables


def measure_counts(
    method: CacheGen, shape: KvShape, runner: Runner, tokenizer: Tokenizer
) -> NDArray[np.int64]:
    """Return how often each symbol occurs in sample texts: [2, layers, channels, bins].

    Args:
        method, shape, runner, tokenizer: see ``load_tables``.
    """
    room = min(runner.slots, runner.config.context)
    counts = np.zeros((2, shape.layers, shape.channels, method.bins), np.int64)
    for number in range(_TEXTS):
        text = needle_text(tokenizer, _TOKENS, _WORDS, number, _SEED).token_ids[:room]
        ModelProbe(runner).queries(text, 0, len(text) - 1)
        slots = np.arange(len(text), dtype=np.int32)
        heads = shape.layers * shape.kv_heads
        cells = cells_of_slots(slots, heads, runner.slots).reshape(-1)
        dumped = b"".join(array.tobytes() for array in runner.cells.dump(cells))
        symbols, _ = quantize(shape.read(dumped, len(text)), method.layer_bins(shape.layers))
        counts += count_symbols(symbols, method.bins)
    return counts


def _read(path: Path, shape: tuple[int, ...]) -> UInt16Array | None:
    """Return stored tables; None if there are none that can be used."""
    try:
        tables: UInt16Array = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        _log.warning("%s can't be used and is made again: %s", path, error)
        return None
    sums = tables.astype(np.int64) if tables.dtype == np.uint16 else None
    if sums is None or tables.shape != shape or (np.diff(sums) < 0).any() or sums[..., 0].any():
        _log.warning("%s holds no tables of this model and is made again", path)
        return None
    return tables


def _write(path: Path, tables: UInt16Array) -> None:
    with path.open("wb") as file:
        np.save(file, tables, allow_pickle=False)
