"""FullLayers: what a method is shown of a model in which some layers have a sliding window.

A windowed layer drops by itself what leaves its window, so there is little for a method to decide
in it: it keeps exactly what its window still shows, whatever the method. Methods see a model that
has the other layers alone.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from midfill.arrays import Float32Array, Int32Array, Int64Array
from midfill.kv.quantized import QuantizedBlock
from midfill.kv.ragged import KeyTerms
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.evict.selection import AddedKeys, Selection
from midfill.methods.evict.streaming_heads import refuse_windows
from midfill.models.config import ModelConfig


class FullLayers:
    """The layers that a method decides on: those that see everything, if only some do.

    In a model whose layers are all alike, these are all layers.

    Attributes:
        config: the model as methods see it.
        layers: [n] int64, the numbers of these layers.
        is_part: whether there are other layers.
    """

    def __init__(self, config: ModelConfig) -> None:
        windows = [config.window_of(layer) for layer in range(config.layers)]
        full = [layer for layer, window in enumerate(windows) if window is None]
        self.is_part = 0 < len(full) < config.layers
        self.config = config
        if self.is_part:
            self.config = replace(
                config, layers=len(full), sliding_window=None, windowed_layers=None
            )
        self.layers = np.array(full if self.is_part else range(config.layers))
        self._window = config.sliding_window or 0
        heads = np.arange(config.kv_heads)
        self._heads = (self.layers[:, None] * config.kv_heads + heads).reshape(-1)

    @classmethod
    def required_by(cls, name: str, config: ModelConfig) -> "FullLayers":
        """Return the layers that a method decides on, which needs some that see the whole text.

        Args:
            name: of the method, for the message.
            config: the model.

        Raises:
            InvalidRequestError: all layers have a sliding window.
        """
        full = cls(config)
        refuse_windows(name, full.config)
        return full

    def keys(self, keys: SequenceKeys) -> SequenceKeys:
        """Return the view of a sequence's keys that a method gets."""
        return keys.of_heads(self.config, self._heads) if self.is_part else keys

    def queries(self, queries: Float32Array) -> Float32Array:
        """Return the observed queries [layers, n, query_heads, head_dim] that a method gets."""
        return queries[self.layers] if self.is_part and len(queries) else queries

    def complete(self, selection: Selection, counts: Int32Array) -> Selection:
        """Return a method's selection with what the other layers keep.

        A later row sees at most the last window - 1 of the keys that are there now. Layers then
        hold different numbers of keys, so gaps are never closed: keys keep their positions.

        Args:
            selection: over the layers that the method sees.
            counts: [layers * kv_heads] int32, keys that each head of the model holds.
        """
        if not self.is_part:
            return selection
        seen = max(self._window - 1, 1)
        shown = [np.arange(max(0, n - seen), n, dtype=np.int32) for n in counts]
        kept = np.split(selection.kept, selection.indptr[1:-1])
        for head, own in zip(self._heads, kept, strict=True):
            shown[head] = own
        completed = Selection.of_heads(
            shown,
            self._added(selection.added, len(counts)),
            self._quantized(selection.quantized, len(counts)),
        )
        return replace(completed, terms=self._terms(selection, completed))

    def _added(self, added: AddedKeys | None, heads: int) -> AddedKeys | None:
        if added is None:
            return None
        sizes = np.zeros(heads, np.int32)
        sizes[self._heads] = np.diff(added.indptr)
        return replace(added, indptr=np.cumsum([0, *sizes]).astype(np.int32))

    def _quantized(
        self, quantized: Sequence[Sequence[QuantizedBlock]] | None, heads: int
    ) -> Sequence[Sequence[QuantizedBlock]] | None:
        if quantized is None:
            return None
        of_heads: list[Sequence[QuantizedBlock]] = [()] * heads
        for head, blocks in zip(self._heads.tolist(), quantized, strict=True):
            of_heads[head] = blocks
        return of_heads

    def _places(self, completed: Selection) -> Int64Array:
        """Return where the method's own keys are among all that stay."""
        starts, ends = completed.indptr[self._heads], completed.indptr[self._heads + 1]
        ranges = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        return np.concatenate(ranges).astype(np.int64)

    def _terms(self, selection: Selection, completed: Selection) -> KeyTerms | None:
        if selection.terms is None:
            return None
        terms = KeyTerms.neutral(len(completed.kept))
        terms.put(self._places(completed), selection.terms)
        return terms
