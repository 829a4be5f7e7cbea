"""Keys of a made-up model of which some are exact and some quantised, without an engine."""

from dataclasses import replace

import fake_keys
import numpy as np

from midfill.kv.quantized import QuantizedBlock
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.evict.selection import Selection

LAYERS, KV_HEADS, GROUP, DIM = 2, 3, 3, 32
HEADS = LAYERS * KV_HEADS
CONFIG = replace(
    fake_keys.CONFIG,
    layers=LAYERS,
    hidden=KV_HEADS * GROUP * DIM,
    query_heads=KV_HEADS * GROUP,
    kv_heads=KV_HEADS,
    head_dim=DIM,
)


class MixedKeys:
    """What each head holds of a text's keys, as selections decide.

    Attributes:
        keys, values: float32 [HEADS, tokens, DIM], of the whole text.
        exact: of each head, the tokens whose keys are exact.
        quantized: of each head, the tokens in its blocks, in the order of these.
        blocks: of each head.
    """

    def __init__(self, tokens: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.keys, self.values = rng.normal(size=(2, HEADS, tokens, DIM)).astype(np.float32)
        self.exact: list[list[int]] = [[] for _ in range(HEADS)]
        self.quantized: list[list[int]] = [[] for _ in range(HEADS)]
        self.blocks: list[list[QuantizedBlock]] = [[] for _ in range(HEADS)]

    def grow(self, start: int, end: int) -> None:
        """Let all heads hold further tokens."""
        for held in self.exact:
            held += range(start, end)

    def view(self) -> SequenceKeys:
        return _View(self)

    def decoded(self, head: int) -> tuple[np.ndarray, np.ndarray]:
        nothing = (np.zeros((0, DIM), np.float32),) * 2
        pairs = [nothing, *(block.decode(DIM) for block in self.blocks[head])]
        keys, values = zip(*pairs, strict=True)
        return np.concatenate(keys), np.concatenate(values)

    def apply(self, selection: Selection) -> None:
        """Hold what a selection leaves, and find out which tokens its blocks are of.

        They are those whose values are nearest to what a block has.
        """
        view = self.view()
        selection.check(view.counts, view.quantized_counts)
        kept = np.split(selection.kept, selection.indptr[1:-1])
        assert selection.quantized is not None
        for head, numbers in enumerate(kept):
            held = np.array(self.exact[head], int)
            gone = np.delete(held, numbers)
            for block in selection.quantized[head]:
                values = block.decode(DIM)[1]
                apart = np.square(values[:, None] - self.values[head][gone]).sum(axis=2)
                self.quantized[head] += gone[apart.argmin(axis=1)].tolist()
            self.blocks[head] += selection.quantized[head]
            self.exact[head] = held[numbers].tolist()


class _View(SequenceKeys):
    def __init__(self, mixed: MixedKeys) -> None:
        self._mixed = mixed
        tokens = mixed.keys.shape[1]
        cells = [np.array(held, np.int32) + head * tokens for head, held in enumerate(mixed.exact)]
        flat = (part.reshape(-1, DIM) for part in (mixed.keys, mixed.values))
        super().__init__(CONFIG, cells, fake_keys.ArrayCells(*flat))
        counts = [sum(block.tokens for block in blocks) for blocks in mixed.blocks]
        self.quantized_counts = np.array(counts, np.int32)

    def read_keys(self, head: int) -> np.ndarray:
        return np.concatenate((self._mixed.decoded(head)[0], self.read(head)[0]))


def made_queries(rows: int, seed: int = 1) -> np.ndarray:
    """Return observed queries [layers, rows, query_heads, head_dim]."""
    shape = (LAYERS, rows, KV_HEADS * GROUP, DIM)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def bytes_per_head(selection: Selection) -> float:
    """Return the mean bytes per head of a selection in float16, without rounding up to cells."""
    assert selection.quantized is not None
    blocks = sum(len(block.data) for head in selection.quantized for block in head)
    return (len(selection.kept) * DIM * 2 * 2 + blocks) / HEADS
