"""What a request's rows attend to, where that is more or less than the keys in its slots.

Usually a request has one part: its slots, of which each row sees those up to its own. An
``AttentionPlan`` may have that part begin with cells (``kv.ragged``), put parts before it that have
a temperature and a scale of their own, and have a lister choose which of its keys are read. All of
it may stand together in one request. Parts are merged by their log-sum-exp, in order.

A lister is asked layer by layer, while a prompt is computed. The rows of a request in a batch are
cut into query blocks of 64. For each block and query head, it lists the keys that its rows attend
to, as spans that lie on no grid. Causality is the kernels' business: a row attends to those of the
listed keys that do not come after it. The lister decides once a layer's queries, keys and values
are there and before its attention; what it may look at is a ``LayerProbe``.

While an answer is written, nothing may stop between layers. So what its rows choose is data, too: a
``PageSelection``, which is carried out within the step.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from midfill.arrays import BoolArray, Float32Array, Int32Array, Int64Array
from midfill.kv.ragged import RaggedIndex
from midfill.models.config import ModelConfig
from midfill.runners.forward.page_selection import PageSelection
from midfill.runners.forward.tree_search import TreeRule

QUERY_BLOCK = 64
"""Rows of a query block; the last one of a batch may have fewer."""


def query_blocks(rows: int) -> int:
    """Return how many query blocks so many rows make."""
    return -(-rows // QUERY_BLOCK)


@dataclass(frozen=True)
class SpanLists:
    """The keys that query blocks attend to, per query head.

    Block b of head h has the spans ``indptr[b * heads + h]:indptr[b * heads + h + 1]``.

    Attributes:
        indptr: [blocks * heads + 1] int32, ascending from 0.
        spans: [n, 2] int32, first key and the one after the last, by position; those of one list
            are ascending and apart. Every row must find its own position in the list.
    """

    indptr: Int32Array
    spans: Int32Array

    @classmethod
    def from_mask(cls, listed: BoolArray) -> "SpanLists":
        """Return the lists that a mask stands for.

        Args:
            listed: [blocks, heads, keys] bool, whether the block of rows attends to the key.
        """
        lists = listed.reshape(-1, listed.shape[2])
        edges = np.zeros((len(lists), listed.shape[2] + 1), np.int8)
        edges[:, :-1] = lists
        edges[:, 1:] -= lists
        # Every list has as many starts as ends, so both come in the same order.
        which, starts = np.nonzero(edges == 1)
        ends = np.nonzero(edges == -1)[1]
        indptr = np.zeros(len(lists) + 1, np.int32)
        np.cumsum(np.bincount(which, minlength=len(lists)), out=indptr[1:])
        return cls(indptr, np.stack((starts, ends), axis=1).astype(np.int32))

    @classmethod
    def of_everything(cls, heads: int, first: int, rows: int) -> "SpanLists":
        """Return the lists of dense attention.

        Args:
            heads: query heads.
            first: position of the first row.
            rows: how many there are.
        """
        ends = first + np.minimum(np.arange(1, query_blocks(rows) + 1) * QUERY_BLOCK, rows)
        spans = np.stack((np.zeros_like(ends), ends), axis=1).repeat(heads, axis=0)
        return cls(np.arange(len(spans) + 1, dtype=np.int32), spans.astype(np.int32))

    def mask(self, rows: int, keys: int) -> BoolArray:
        """Return which keys each row attends to: [query_heads, rows, keys] bool, causal.

        Args:
            rows: how many there are.
            keys: how many the last row sees.
        """
        blocks = query_blocks(rows)
        heads = (len(self.indptr) - 1) // blocks
        listed = np.zeros((heads, rows, keys), bool)
        for unit in range(blocks * heads):
            block, head = divmod(unit, heads)
            for start, end in self.spans[self.indptr[unit] : self.indptr[unit + 1]]:
                listed[head, block * QUERY_BLOCK : (block + 1) * QUERY_BLOCK, start:end] = True
        listed &= np.tri(rows, keys, keys - rows, dtype=bool)
        return listed


class LayerProbe(Protocol):
    """What a lister may look at: a request's rotated queries and its keys in one layer.

    Attributes:
        layer: which one.
        first: how many keys come before that of the batch's first row of the request.
        rows: how many there are.
        query_heads, kv_heads: of the model; query head h reads KV head h // (their ratio).
        scale: factor of q.k before the softmax.
    """

    layer: int
    first: int
    rows: int
    query_heads: int
    kv_heads: int
    scale: float

    def masses(self, rows: int) -> tuple[Float32Array, Float32Array]:
        """Return how much attention the last ``rows`` rows pay to each key and to each distance.

        Returns:
            columns: [query_heads, keys], the softmax weights summed over the rows.
            diagonals: [query_heads, keys], entry o summed over the weights of the keys o before
                their row.
        """

    def last_queries(self, rows: int) -> Float32Array:
        """Return the rotated queries of the last ``rows`` rows: [rows, query_heads, head_dim]."""

    def mean_queries(self, block: int) -> Float32Array:
        """Return the mean query of each ``block`` rows, the last ones as many as there are.

        Returns:
            [query_heads, blocks, head_dim].
        """

    def mean_keys(self, block: int) -> Float32Array:
        """Return the mean key of each ``block`` keys, as stored.

        Args:
            block: 32, 64 or 128.

        Returns:
            [kv_heads, blocks, head_dim].
        """

    def search(self, rule: TreeRule, stride: int) -> Int32Array:
        """Return which keys each block of 64 rows chooses: [blocks, query_heads, width] int32.

        Args:
            rule: how they are found; not by every key.
            stride: every so many rows of a block search together, from its first one on; all keys
                before the first row's window are searched.
        """


class KeyLister(Protocol):
    """Chooses the keys that the rows of one request attend to in one batch."""

    def plan(self, probe: LayerProbe) -> SpanLists:
        """Return the lists of one layer; called for one layer after the other.

        Layers with a sliding window are not asked about: they attend to their window.
        """

    def record(self, layer: int, pairs: Int64Array) -> None:
        """Note what was computed in a layer.

        Args:
            layer: which one.
            pairs: [query_heads], products of a query with a key, those of keys that come after
                their row but share a block with it included.
        """


class KeyPairs:
    """Counts products of queries with keys, of rows whose keys were listed.

    Attributes:
        computed: [layers, query_heads] int64, those that were computed.
        causal: [layers] int64, those that dense attention has per query head for the same rows.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.computed: Int64Array = np.zeros((config.layers, config.query_heads), np.int64)
        self.causal: Int64Array = np.zeros(config.layers, np.int64)

    @property
    def totals(self) -> tuple[int, int]:
        """Return what was computed and what dense attention has, in all layers and heads."""
        return int(self.computed.sum()), int(self.causal.sum()) * self.computed.shape[1]


@dataclass(frozen=True)
class KeyPart:
    """Keys that a request's rows attend to apart from those in its own slots.

    With the scores s of a part's keys, o = softmax(s / temperature) V and the mass
    m = scale * temperature * log sum exp(s / temperature). A row's attention is the sum of the o of
    all parts, each weighted with the softmax of the m.

    Attributes:
        slots: [n] int32.
        cells: before the slots, other ones in each layer and head; None if there are none.
        visible: [rows] int32, how many of the slots each row of the batch sees, ascending; None is
            all of them, for every row.
        temperature: divides the scores; above 0.
        scale: of the mass; above 0.
    """

    slots: Int32Array
    cells: RaggedIndex | None = None
    visible: Int32Array | None = None
    temperature: float = 1.0
    scale: float = 1.0

    @property
    def power(self) -> float:
        """The power that the part's sum of exponentials is raised to."""
        return self.scale * self.temperature


@dataclass(frozen=True)
class AttentionPlan:
    """What is unusual in the attention of one request.

    Attributes:
        cells: what its rows see before its slots; None if that is nothing.
        lister: chooses which of the cells and slots are read; None reads all.
        parts: parts before the one that the cells and slots are.
        selection: pages of the cells and slots that rows choose by their queries; None reads all.
        by_parts: whether rows attend to each part of the latents by itself, where a runner has
            these in parts (``runners.torch.latent_parts``). Elsewhere it says nothing.
    """

    cells: RaggedIndex | None = None
    lister: KeyLister | None = None
    parts: tuple[KeyPart, ...] = ()
    selection: PageSelection | None = None
    by_parts: bool = False

    @property
    def is_dense(self) -> bool:
        """Whether there is one part, all of whose keys are exact and read."""
        chooses = self.lister is not None or self.selection is not None
        return not chooses and not self.parts and not _has_blocks(self.cells)

    def check(self, config: ModelConfig, rows: int) -> None:
        """Check that it fits a model and the rows of its request.

        Raises:
            ValueError: it doesn't; names the part, counted from 0.
        """
        own = len(self.parts)
        for number, part in enumerate(self.parts):
            _check_part(part, config, rows, f"part {number}")
        if self.cells is not None:
            _check_cells(self.cells, config, f"part {own}")
            if self.lister is not None and _differs_in_layer(self.cells, config):
                raise ValueError(
                    f"part {own}: listed cells must be as many in each head of a layer"
                )
        if self.selection is not None:
            self.selection.check(config, rows)
            if self.lister is not None:
                raise ValueError(f"part {own}: its keys are listed or chosen, not both")
            if _has_blocks(self.cells):
                raise ValueError(f"part {own}: pages are chosen of exact keys only")
        if self.parts and config.sliding_window is not None:
            raise ValueError("part 0: rows in layers with a sliding window see one part only")
        if self.cells is not None and _has_blocks_in_windows(self.cells, config):
            raise ValueError(f"part {own}: rows with a sliding window see no quantised keys")


def _has_blocks(cells: RaggedIndex | None) -> bool:
    return cells is not None and cells.quantized is not None


def _has_blocks_in_windows(cells: RaggedIndex, config: ModelConfig) -> bool:
    """Whether layers with a sliding window have blocks, all of whose keys every row would see."""
    if cells.quantized is None:
        return False
    indptr, heads = cells.quantized.indptr, config.kv_heads
    return any(
        indptr[layer * heads] < indptr[(layer + 1) * heads]
        for layer in range(config.layers)
        if config.window_of(layer) is not None
    )


def _check_part(part: KeyPart, config: ModelConfig, rows: int, name: str) -> None:
    if not (part.temperature > 0 and part.scale > 0):
        raise ValueError(f"{name}: temperature and scale must be above 0")
    if part.cells is not None:
        _check_cells(part.cells, config, name)
    elif not len(part.slots):
        raise ValueError(f"{name}: it has no keys")
    if part.visible is None:
        return
    if len(part.visible) != rows:
        raise ValueError(f"{name}: it says for {len(part.visible)} rows what they see, not {rows}")
    if (np.diff(part.visible) < 0).any() or not 0 <= part.visible[-1] <= len(part.slots):
        raise ValueError(f"{name}: rows see 0 to {len(part.slots)} slots, later ones no fewer")


def _check_cells(cells: RaggedIndex, config: ModelConfig, name: str) -> None:
    heads = config.layers * config.kv_heads
    if len(cells.indptr) != heads + 1:
        raise ValueError(
            f"{name}: cells of {len(cells.indptr) - 1} heads, but the model has {heads}"
        )
    if cells.indptr[-1] != len(cells.cells):
        raise ValueError(f"{name}: {len(cells.cells)} cells, but its heads have {cells.indptr[-1]}")
    if cells.quantized is not None and len(cells.quantized.indptr) != heads + 1:
        raise ValueError(f"{name}: blocks of {len(cells.quantized.indptr) - 1} heads, not {heads}")
    terms = cells.terms
    if terms is not None and len(terms.score_factor) != len(cells.cells):
        raise ValueError(f"{name}: terms of {len(terms.score_factor)} of {len(cells.cells)} cells")


def _differs_in_layer(cells: RaggedIndex, config: ModelConfig) -> bool:
    counts = np.diff(cells.indptr).reshape(config.layers, config.kv_heads)
    return bool((counts != counts[:, :1]).any())
