"""Selection: which of a sequence's keys stay in the KV cache, layer by layer and head by head."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from midfill.arrays import Float32Array, Int32Array, Int64Array
from midfill.kv.quantized import QuantizedBlock
from midfill.kv.ragged import KeyTerms


@dataclass(frozen=True)
class AddedKeys:
    """Keys and values that a method has computed to stand for others.

    Head i = l * kv_heads + h of the model gets the entries from ``indptr[i]`` to ``indptr[i + 1]``,
    in front of the keys that it keeps. Several heads may list one key, each with terms of its own;
    it is stored once.

    Attributes:
        keys, values: float32 [n, head_dim]; keys after the rotary embedding. They are rounded as
            the KV cache rounds.
        indptr: [layers * kv_heads + 1] int32, ascending from 0 to m, the number of entries.
        terms: how much each entry counts; None is as any other key.
        listed: [m] int32, which of the keys each entry is; None: each key is one head's alone, in
            order, so m = n.
        replaced: [m] int32, which of its head's keys each entry stands for, numbered as the head
            holds them now; None: each stands for several.
    """

    keys: Float32Array
    values: Float32Array
    indptr: Int32Array
    terms: KeyTerms | None = None
    listed: Int32Array | None = None
    replaced: Int32Array | None = None

    def entries(self) -> Int32Array:
        """Return which of the keys each entry is: [m] int32."""
        return np.arange(len(self.keys), dtype=np.int32) if self.listed is None else self.listed


@dataclass(frozen=True)
class Selection:
    """The keys that stay, of each layer and KV head.

    Head h of layer l keeps the keys ``kept[indptr[i]:indptr[i + 1]]`` for i = l * kv_heads + h,
    numbered as the head holds them now, in ascending order.

    Attributes:
        kept: [n] int32.
        indptr: [layers * kv_heads + 1] int32.
        terms: of the keys that stay; None keeps the terms that they have.
        close_gaps: move the keys that stay towards the next token, which keeps its position, until
            they lie side by side. All heads have to keep equally many. Only distances count, so
            that is the same as numbering the keys within the cache, and moves fewer of them: where
            a window rolls on, the sinks. Where positions come to an end, all of them and the next
            token move to the first ones. A sequence whose gaps were closed once closes them always.
            Otherwise keys keep their positions.
        added: keys that come to those that stay; None adds none. Gaps can't be closed then.
        quantized: blocks that each head gets after those that it has, for keys that don't stay;
            None adds none. Gaps can't be closed then.
    """

    kept: Int32Array
    indptr: Int32Array
    terms: KeyTerms | None = None
    close_gaps: bool = False
    added: AddedKeys | None = None
    quantized: Sequence[Sequence[QuantizedBlock]] | None = None

    @classmethod
    def of_heads(
        cls,
        kept: Sequence[Int32Array],
        added: AddedKeys | None = None,
        quantized: Sequence[Sequence[QuantizedBlock]] | None = None,
    ) -> "Selection":
        """Return the selection of keys [n] per layer and head, each in any order."""
        ends = np.cumsum([0, *(len(keys) for keys in kept)])
        ordered = [np.sort(keys) for keys in kept]
        chosen, indptr = np.concatenate(ordered).astype(np.int32), ends.astype(np.int32)
        return cls(chosen, indptr, added=added, quantized=quantized)

    def shift(self, counts: Int32Array, back: int = 0) -> Int32Array:
        """Return by how many positions each key moves: [n] int32, 0 unless gaps are closed.

        Args:
            counts: [layers * kv_heads] int32, keys that each head holds now.
            back: by how many positions the next token moves back, and all keys with it.
        """
        if not self.close_gaps:
            return np.zeros_like(self.kept)
        sizes = np.diff(self.indptr)
        number = np.arange(len(self.kept), dtype=np.int32) - np.repeat(self.indptr[:-1], sizes)
        return number - self.kept + np.repeat(counts - sizes - np.int32(back), sizes)

    @classmethod
    def of_tokens(cls, kept: Int32Array, heads: int) -> "Selection":
        """Return the selection of the same keys in every layer and head.

        Args:
            kept: [n] int32, in any order.
            heads: layers * kv_heads.
        """
        return cls.of_heads([kept] * heads)

    @classmethod
    def of_all(cls, counts: Int32Array) -> "Selection":
        """Return the selection of all keys, which lie side by side.

        Args:
            counts: [layers * kv_heads] int32, keys that each head holds: equally many.
        """
        every = np.arange(counts[0], dtype=np.int32)
        return replace(cls.of_tokens(every, len(counts)), close_gaps=True)

    def check(self, counts: Int32Array, quantized: Int32Array | int = 0) -> None:
        """Check that it selects from heads that hold ``counts`` [layers * kv_heads] keys.

        Args:
            counts: of exact keys.
            quantized: [layers * kv_heads] int32, of quantised ones.

        Raises:
            ValueError: a key does not exist, is named twice or out of order, a head is left with
                none, gaps can't be closed, an added key holds a value that is no number, or entries
                name other added keys than there are.
        """
        if (
            len(self.indptr) != len(counts) + 1
            or self.indptr[0]
            or self.indptr[-1] != len(self.kept)
        ):
            raise ValueError("a selection needs the kept keys of every layer and head")
        sizes = np.diff(self.indptr)
        if (sizes + self._count_added(counts) + quantized + self._count_quantized() < 1).any():
            raise ValueError("every head has to keep at least one key")
        changed = self.added is not None or self.quantized is not None
        if self.close_gaps and (changed or (sizes != sizes[0]).any()):
            raise ValueError("gaps can be closed only if all heads keep equally many keys")
        owner = np.repeat(np.arange(len(counts)), sizes)
        if self.kept.min(initial=0) < 0 or (self.kept >= counts[owner]).any():
            raise ValueError("a selection names keys that don't exist")
        if ((np.diff(self.kept) <= 0) & (np.diff(owner) == 0)).any():
            raise ValueError("a selection's keys must ascend within a head")

    def _count_quantized(self) -> Int64Array:
        """Return how many quantised keys each head gets: [heads].

        Raises:
            ValueError: they don't fit the heads.
        """
        heads = len(self.indptr) - 1
        if self.quantized is None:
            return np.zeros(heads, np.int64)
        if len(self.quantized) != heads:
            raise ValueError("a selection needs the blocks of every layer and head")
        return np.array([sum(each.tokens for each in blocks) for blocks in self.quantized])

    def _count_added(self, counts: Int32Array) -> Int64Array:
        """Return how many entries are added to each head: [heads].

        Args:
            counts: [heads] int32, keys that each holds.

        Raises:
            ValueError: they don't fit the heads, or hold a value that is no number.
        """
        added = self.added
        if added is None:
            return np.zeros(len(counts), np.int64)
        keys, values, indptr, entries = added.keys, added.values, added.indptr, added.entries()
        if (
            len(indptr) != len(counts) + 1
            or indptr[0]
            or indptr[-1] != len(entries)
            or len(keys) != len(values)
        ):
            raise ValueError("added keys need their number for every layer and head")
        if not (np.isfinite(keys).all() and np.isfinite(values).all()):
            raise ValueError("an added key or value is no finite number")
        sizes = np.diff(indptr).astype(np.int64)
        if added.listed is not None:
            if entries.min(initial=0) < 0 or entries.max(initial=-1) >= len(keys):
                raise ValueError("an entry lists an added key that doesn't exist")
            if not np.bincount(entries, minlength=len(keys)).all():
                raise ValueError("every added key has to be listed by a head")
        replaced = added.replaced
        if replaced is not None and (
            len(replaced) != len(entries)
            or replaced.min(initial=0) < 0
            or (replaced >= np.repeat(counts, sizes)).any()
        ):
            raise ValueError("added keys replace keys that don't exist")
        return sizes
