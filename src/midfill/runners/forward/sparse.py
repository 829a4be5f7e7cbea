"""Sparse prefill: which keys a prompt's rows attend to, chosen layer by layer while it is computed.

The rows of a request in a batch are cut into query blocks of 64. For each block and query head, a
planner lists the keys that its rows attend to, as spans that lie on no grid. Causality is the
kernels' business: a row attends to those of the listed keys that do not come after it.

The planner decides once a layer's queries, keys and values are there and before its attention. What
it may look at is a ``LayerProbe``.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from midfill.arrays import BoolArray, Float32Array, Int32Array, Int64Array

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


class LayerProbe(Protocol):
    """What a planner may look at: a request's rotated queries and its keys in one layer.

    Attributes:
        layer: which one.
        first: position of the batch's first row of the request.
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
        ...

    def last_queries(self, rows: int) -> Float32Array:
        """Return the rotated queries of the last ``rows`` rows: [rows, query_heads, head_dim]."""
        ...

    def mean_queries(self, block: int) -> Float32Array:
        """Return the mean query of each ``block`` rows, the last ones as many as there are.

        Returns:
            [query_heads, blocks, head_dim].
        """
        ...

    def mean_keys(self, block: int) -> Float32Array:
        """Return the mean key of each ``block`` keys, as stored.

        Args:
            block: 32, 64 or 128.

        Returns:
            [kv_heads, blocks, head_dim].
        """
        ...


class SparsePlanner(Protocol):
    """Chooses the keys that the rows of one request attend to in one batch."""

    def plan(self, probe: LayerProbe) -> SpanLists:
        """Return the lists of one layer; called for one layer after the other.

        Layers with a sliding window are not asked about: they attend to their window.
        """
        ...

    def record(self, layer: int, pairs: Int64Array) -> None:
        """Note what was computed in a layer.

        Args:
            layer: which one.
            pairs: [query_heads], products of a query with a key, those of keys that come after
                their row but share a block with it included.
        """
        ...
