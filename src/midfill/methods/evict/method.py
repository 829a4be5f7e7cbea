"""CompressionMethod: the protocol of everything that makes a sequence's KV smaller.

A method decides, from numbers that it asks for, which keys stay. The engine moves them, frees the
others' slots, and keeps the exact KV of the prompt in the prefix cache as long as there is room.
Compression happens between steps, so nothing stops within one.
"""

from typing import Protocol, Self, runtime_checkable

import numpy as np

from midfill.arrays import Float32Array, Int32Array, Int64Array
from midfill.kv.quantized import QuantizedBlock, QuantizedBlocks, cell_data
from midfill.methods.evict.selection import Selection
from midfill.models.config import ModelConfig
from midfill.runners.forward.cells import CellStore


class SequenceKeys:
    """The keys of a sequence as its layers and heads hold them; a view of the KV cache.

    Exact keys have numbers, from 0 on. Quantised ones, which rows see as well, have none: whatever
    was quantised stays as it is.

    Attributes:
        config: the model.
        counts: [layers * kv_heads] int32, exact keys that each head holds.
        quantized_counts: [layers * kv_heads] int32, quantised keys that each head holds.
    """

    def __init__(
        self,
        config: ModelConfig,
        cells: list[Int32Array],
        store: CellStore,
        quantized: QuantizedBlocks | None = None,
        heads: Int64Array | None = None,
    ) -> None:
        """View some cells.

        Args:
            config: the model.
            cells: those of each layer and head, in the order of their keys.
            store: the KV cache.
            quantized: what was quantised before.
            heads: [layers * kv_heads], which heads of ``quantized`` these are; None: all.
        """
        self.config = config
        self.counts = np.array([len(keys) for keys in cells], np.int32)
        self._heads = np.arange(len(cells)) if heads is None else heads
        self.quantized_counts = np.zeros(len(cells), np.int32)
        if quantized is not None:
            self.quantized_counts = quantized.counts[self._heads]
        self._cells = cells
        self._store = store
        self._quantized = quantized

    @property
    def heads(self) -> int:
        """layers * kv_heads."""
        return len(self._cells)

    def cells(self, head: int) -> Int32Array:
        """Return the cells of head ``layer * kv_heads + head``: [n] int32."""
        return self._cells[head]

    def of_heads(self, config: ModelConfig, heads: Int64Array) -> "SequenceKeys":
        """Return a view of some heads, which are all that ``config`` has."""
        cells = [self._cells[head] for head in heads]
        return SequenceKeys(config, cells, self._store, self._quantized, self._heads[heads])

    def read(
        self, head: int, numbers: Int32Array | None = None
    ) -> tuple[Float32Array, Float32Array]:
        """Return keys and values of head ``layer * kv_heads + head``: float32 [n, head_dim].

        Args:
            head: which one.
            numbers: [n] int32, which of its keys; None is all.
        """
        cells = self._cells[head]
        return self._store.read(cells if numbers is None else cells[numbers])

    def read_keys(self, head: int) -> Float32Array:
        """Return all keys of head ``layer * kv_heads + head``, the quantised ones first.

        Returns:
            float32 [n, head_dim].
        """
        exact, quantized = self._store.read_keys(self._cells[head]), self._quantized
        if quantized is None:
            return exact
        numbers = quantized.numbers(int(self._heads[head]))
        blocks = [self._block(quantized, number) for number in numbers]
        return np.concatenate((*(each.decode_keys(self.config.head_dim) for each in blocks), exact))

    def _block(self, quantized: QuantizedBlocks, number: int) -> QuantizedBlock:
        cells = quantized.cells_of(number)
        return quantized.block(number, cell_data(*self._store.dump(cells)))


class SequenceCompressor(Protocol):
    """A method at work on one sequence; it may hold state.

    A sequence that is preempted is computed anew, and a new compressor is asked the same questions
    again, with the same arguments.
    """

    def fork(self) -> "SequenceCompressor":
        """Return a compressor in the same state, for another answer to the same prompt."""

    def observe(self, keys: SequenceKeys, queries: Float32Array) -> None:
        """Take note of a block of the prompt's rows; only where the method has ``block_rows``.

        Args:
            keys: of the prompt up to the block's end.
            queries: float32 [layers, n, query_heads, head_dim], rotated: of the block's rows.
        """

    def select(self, keys: SequenceKeys, queries: Float32Array) -> Selection | None:
        """Decide what stays: once the prompt is computed, then after every ``interval`` tokens.

        Args:
            keys: all that the sequence holds: what stayed the last time, then later tokens.
            queries: float32 [layers, n, query_heads, head_dim], rotated: of the last
                ``observed_rows`` rows, as far as they are new since the last call; empty where
                none is observed.

        Returns:
            What stays; None keeps everything.
        """


@runtime_checkable
class CompressionMethod(Protocol):
    """A method with its hyper-parameters."""

    @property
    def observed_rows(self) -> int:
        """How many of the last rows before each decision have their queries observed.

        In the prompt, these always run, whatever is cached of it.
        """

    @property
    def block_rows(self) -> int:
        """Hand observed rows of the prompt over in blocks that end at multiples of this; 0: don't.

        For methods that observe so many rows that their queries had better not be kept.
        """

    @property
    def interval(self) -> int:
        """After how many tokens of the answer it decides again; 0: it decides once."""

    def start(self, config: ModelConfig) -> SequenceCompressor:
        """Return a compressor for a new sequence."""


@runtime_checkable
class RecallingMethod(Protocol):
    """A method that remembers what it has observed in earlier prompts, up to the ends of blocks.

    Rows that it remembers need not run again, so a prompt's beginning may come from the cache.
    """

    def recall(self, tokens: Int32Array, tenant: str) -> "tuple[int, SequenceCompressor]":
        """Begin with a new sequence.

        Args:
            tokens: [n] int32, those before the first decision.
            tenant: whose they are; tenants share nothing.

        Returns:
            How many of the first rows it has observed before, and a compressor that has.
        """


@runtime_checkable
class RollingMethod(Protocol):
    """A method of keys side by side that never become more: answers may outgrow the context."""

    def held_tokens(self, prompt: int, config: ModelConfig) -> int | None:
        """Return how many tokens a layer holds at most while an answer grows; None: ever more.

        Args:
            prompt: tokens of the prompt.
            config: the model.
        """


class MethodDefaults:
    """Answers of a method that observes nothing and decides once; fields of the same name win."""

    @property
    def observed_rows(self) -> int:
        """No row."""
        return 0

    @property
    def block_rows(self) -> int:
        """No blocks: all observed rows go to ``select``."""
        return 0

    @property
    def interval(self) -> int:
        """Never again."""
        return 0


class OneShot(MethodDefaults):
    """Base of methods without state: each is its own compressor."""

    def start(self, config: ModelConfig) -> Self:
        """Return the method itself; it has no state."""
        return self

    def fork(self) -> Self:
        """Return the method itself; it has no state."""
        return self

    def observe(self, keys: SequenceKeys, queries: Float32Array) -> None:
        """Do nothing; it has no state."""
