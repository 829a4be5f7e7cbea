"""Keys of a small made-up model, for tests of what methods select."""

import numpy as np

from midfill.methods.evict.method import SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.models.config import ModelConfig
from midfill.runners.forward.cells import StoredCells

LAYERS, KV_HEADS, GROUP, DIM = 4, 3, 3, 8
CONFIG = ModelConfig(
    family="fake",
    layers=LAYERS,
    hidden=KV_HEADS * GROUP * DIM,
    query_heads=KV_HEADS * GROUP,
    kv_heads=KV_HEADS,
    head_dim=DIM,
    ffn=0,
    vocab=10,
    context=4096,
)


class ArrayCells:
    """Cells in two arrays, keys and values [cells, head_dim]; keys are not rotated."""

    def __init__(self, keys: np.ndarray, values: np.ndarray) -> None:
        self.keys, self.values = keys, values

    def read(self, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.keys[cells], self.values[cells]

    def read_keys(self, cells: np.ndarray) -> np.ndarray:
        return self.keys[cells]

    def write(self, cells: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        self.keys[cells], self.values[cells] = keys, values

    def take(self, cells: np.ndarray, shift: np.ndarray | None = None) -> StoredCells:
        assert shift is None
        return StoredCells(self.read(cells))

    def put(self, cells: np.ndarray, stored: StoredCells) -> None:
        self.write(cells, *stored.arrays)


def fake_keys(tokens: int, seed: int = 0) -> tuple[SequenceKeys, ArrayCells]:
    """Return the keys of a prompt, and the arrays behind them, [head * tokens + token]."""
    rng = np.random.default_rng(seed)
    heads = LAYERS * KV_HEADS
    arrays = rng.normal(size=(2, heads * tokens, DIM)).astype(np.float32)
    store = ArrayCells(arrays[0], arrays[1])
    cells = np.arange(heads * tokens, dtype=np.int32).reshape(heads, tokens)
    return SequenceKeys(CONFIG, list(cells), store), store


def fake_queries(rows: int, seed: int = 1) -> np.ndarray:
    """Return observed queries [layers, rows, query_heads, head_dim]."""
    shape = (LAYERS, rows, KV_HEADS * GROUP, DIM)
    return 3 * np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def naive_attention(store: ArrayCells, queries: np.ndarray, tokens: int) -> np.ndarray:
    """Attention weights [layers, query_heads, rows, tokens], one row at a time."""
    layers, rows, heads, _ = queries.shape
    weights = np.zeros((layers, heads, rows, tokens))
    for layer, head, row in np.ndindex(layers, heads, rows):
        seen = tokens - rows + row + 1
        start = (layer * KV_HEADS + head // GROUP) * tokens
        scores = store.keys[start : start + seen].astype(np.float64) @ queries[layer, row, head]
        powers = np.exp(scores / np.sqrt(DIM) - (scores / np.sqrt(DIM)).max())
        weights[layer, head, row, :seen] = powers / powers.sum()
    return weights


def kept_of(selection: Selection, layer: int, head: int) -> list[int]:
    """Return the keys that a selection keeps in one head."""
    place = layer * KV_HEADS + head
    return selection.kept[selection.indptr[place] : selection.indptr[place + 1]].tolist()
