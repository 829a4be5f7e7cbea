"""RaggedIndex: the KV that a sequence attends to where layers and heads keep different tokens.

A *cell* is the K and V of one token in one layer and one KV head. Its number is
``(layer * kv_heads + head) * slots + slot``, in every runner. An ordinary sequence reads the same
slots in all layers and heads. A compressed one keeps other tokens in each, packed into as few slots
as they fill: any head's keys may lie in any cell, those of other layers and heads too. One cell
may serve several heads.
"""

from dataclasses import dataclass, replace

import numpy as np

from midfill.arrays import BoolArray, Float32Array, Int32Array, Int64Array
from midfill.kv.quantized import QuantizedBlocks


@dataclass(frozen=True)
class KeyTerms:
    """What changes the weight of each cell of a RaggedIndex: see ``RaggedIndex``.

    Attributes:
        score_factor, score_bias, value_factor: [cells] float32.
    """

    score_factor: Float32Array
    score_bias: Float32Array
    value_factor: Float32Array

    @classmethod
    def neutral(cls, cells: int) -> "KeyTerms":
        """Return terms that change nothing."""
        ones = np.ones(cells, np.float32)
        return cls(ones, np.zeros(cells, np.float32), ones.copy())

    @property
    def nbytes(self) -> int:
        """Memory of all terms."""
        return self.score_factor.nbytes + self.score_bias.nbytes + self.value_factor.nbytes

    def take(self, cells: Int32Array) -> "KeyTerms":
        """Return the terms of some cells; -1 stands for one without."""
        terms = zip((self.score_factor, self.score_bias, self.value_factor), (1, 0, 1), strict=True)
        taken = [np.where(cells < 0, np.float32(none), term[cells]) for term, none in terms]
        return KeyTerms(taken[0], taken[1], taken[2])

    def put(self, places: Int64Array, terms: "KeyTerms") -> None:
        """Replace the terms at [n] places."""
        self.score_factor[places] = terms.score_factor
        self.score_bias[places] = terms.score_bias
        self.value_factor[places] = terms.value_factor


@dataclass(frozen=True)
class RaggedIndex:
    """The cells that every row of a sequence sees before its ordinary slots.

    Head h of layer l sees its quantised blocks, if there are any, then the cells
    ``cells[indptr[i]:indptr[i + 1]]`` for i = l * kv_heads + h, in this order, then the sequence's
    slots. A query q has the score
    ``score_factor * (q . k) * scale + score_bias`` with a cell's key k, and its value counts
    ``value_factor`` times.

    Attributes:
        cells: [n] int32, numbers of cells.
        indptr: [layers * kv_heads + 1] int32, ascending from 0 to n.
        terms: None where all factors are 1 and all biases 0.
        shared: whether several heads may list one cell, each with terms of its own.
        quantized: keys at few bits, which have cells of their own; None if there are none.
    """

    cells: Int32Array
    indptr: Int32Array
    terms: KeyTerms | None = None
    shared: bool = False
    quantized: QuantizedBlocks | None = None

    def take(self, chosen: BoolArray) -> "RaggedIndex":
        """Return the index of some of its cells: [n] bool; quantised blocks stay."""
        counts = np.cumsum(np.concatenate(([0], chosen)))
        places = np.flatnonzero(chosen).astype(np.int32)
        terms = None if self.terms is None else self.terms.take(places)
        indptr = counts[self.indptr].astype(np.int32)
        return replace(self, cells=self.cells[chosen], indptr=indptr, terms=terms)

    @property
    def nbytes(self) -> int:
        """Memory of the lists and terms, without the cells."""
        terms = 0 if self.terms is None else self.terms.nbytes
        quantized = 0 if self.quantized is None else self.quantized.nbytes
        return self.cells.nbytes + self.indptr.nbytes + terms + quantized

    @property
    def most(self) -> int:
        """The largest number of cells that a layer's head keeps."""
        return int(np.diff(self.indptr).max(initial=0))


def cells_of_slots(slots: Int32Array, heads: int, total_slots: int) -> Int32Array:
    """Return the cells of some slots in every layer and head: [heads, n] int32.

    Args:
        slots: [n] int32.
        heads: layers * kv_heads.
        total_slots: slots of the KV cache.
    """
    return np.arange(heads, dtype=np.int32)[:, None] * np.int32(total_slots) + slots[None, :]
