"""Sparse prefill in torch: the plain form of what ``runners.forward.sparse`` describes.

The reference for the CPU kernels. It computes all scores and masks those of keys that are not
listed, so nothing is saved here.
"""

from dataclasses import dataclass

import numpy as np
import torch

from midfill.arrays import BoolArray, Float32Array
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.sparse import QUERY_BLOCK, SpanLists, SparsePlanner, query_blocks


@dataclass(frozen=True)
class SparseRequest:
    """The rows of a request with a planner.

    Attributes:
        planner: chooses their keys.
        rows: [queries] int64, rows of the packed batch.
        slots: [keys] int64, of the request; they end with those of the rows.
    """

    planner: SparsePlanner
    rows: torch.Tensor
    slots: torch.Tensor


def prepare_sparse(batch: ForwardBatch, device: torch.device) -> tuple[SparseRequest, ...]:
    """Return the batch's requests with a planner, once for all layers."""
    found = []
    for request, planner in enumerate(batch.sparse):
        if planner is not None:
            rows = np.arange(batch.query_indptr[request], batch.query_indptr[request + 1])
            slots = batch.kv_slots[batch.kv_indptr[request] : batch.kv_indptr[request + 1]]
            indices = (torch.from_numpy(each).to(device, torch.int64) for each in (rows, slots))
            found.append(SparseRequest(planner, *indices))
    return tuple(found)


def attend_sparse(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    request: SparseRequest,
    layer: int,
    scale: float,
) -> torch.Tensor:
    """Have a planner choose the keys of a layer, and compute the request's attention to them.

    Args:
        queries: [rows of the batch, query_heads, head_dim].
        keys, values: the layer's KV [slots, kv_heads, head_dim], the batch's rows written.
        request: from ``prepare_sparse``.
        layer: which one.
        scale: factor of q.k.

    Returns:
        [queries, query_heads, head_dim].
    """
    q = queries[request.rows].float()
    k, v = keys[request.slots].float(), values[request.slots].float()
    probe = TorchProbe(layer, q, k, scale)
    lists = request.planner.plan(probe)
    listed = torch.from_numpy(list_mask(lists, len(q), len(k))).to(q.device)
    scores = probe.scores(len(q)).masked_fill(~listed, -torch.inf)
    group = q.shape[1] // k.shape[1]
    out = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v.repeat_interleave(group, dim=1))
    blocks = np.diff(lists.indptr).reshape(-1, q.shape[1])
    lengths = np.add.reduceat(
        np.append(lists.spans[:, 1] - lists.spans[:, 0], 0), lists.indptr[:-1]
    ).reshape(blocks.shape)
    rows = np.minimum(QUERY_BLOCK, len(q) - np.arange(len(blocks)) * QUERY_BLOCK)
    request.planner.record(layer, (lengths * rows[:, None]).sum(axis=0).astype(np.int64))
    return out.to(queries.dtype)


def list_mask(lists: SpanLists, rows: int, keys: int) -> BoolArray:
    """Return which keys each row attends to: [query_heads, rows, keys] bool, causal.

    Args:
        lists: of the rows.
        rows: how many there are.
        keys: how many the last row sees.
    """
    blocks = query_blocks(rows)
    heads = (len(lists.indptr) - 1) // blocks
    listed = np.zeros((heads, rows, keys), bool)
    for unit in range(blocks * heads):
        block, head = divmod(unit, heads)
        for start, end in lists.spans[lists.indptr[unit] : lists.indptr[unit + 1]]:
            listed[head, block * QUERY_BLOCK : (block + 1) * QUERY_BLOCK, start:end] = True
    listed &= np.tri(rows, keys, keys - rows, dtype=bool)
    return listed


class TorchProbe:
    """Implements ``runners.forward.sparse.LayerProbe``.

    Args:
        layer: which one.
        queries: [rows, query_heads, head_dim] float32.
        keys: [keys, kv_heads, head_dim] float32, those of the rows last.
        scale: factor of q.k.
    """

    def __init__(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, scale: float) -> None:
        self.layer = layer
        self.rows, self.query_heads = queries.shape[:2]
        self.kv_heads = keys.shape[1]
        self.first = len(keys) - self.rows
        self.scale = scale
        self._queries, self._keys = queries, keys

    def scores(self, rows: int) -> torch.Tensor:
        """Return the scores of the last rows with all keys, [query_heads, rows, keys]; causal."""
        keys = self._keys.repeat_interleave(self.query_heads // self.kv_heads, dim=1)
        scores = torch.einsum("qhd,khd->hqk", self._queries[self.rows - rows :], keys) * self.scale
        count = len(keys)
        later = torch.ones(rows, count, dtype=torch.bool, device=scores.device)
        return scores.masked_fill(later.triu(count - rows + 1), -torch.inf)

    def masses(self, rows: int) -> tuple[Float32Array, Float32Array]:
        """See ``LayerProbe.masses``."""
        weights = self.scores(rows).softmax(dim=-1).cpu().numpy()
        count = weights.shape[2]
        diagonals = np.zeros((self.query_heads, count), np.float32)
        for row in range(rows):
            seen = count - rows + row + 1
            diagonals[:, :seen] += weights[:, row, :seen][:, ::-1]
        columns: Float32Array = weights.sum(axis=1)
        return columns, diagonals

    def last_queries(self, rows: int) -> Float32Array:
        """See ``LayerProbe.last_queries``."""
        queries: Float32Array = self._queries[self.rows - rows :].cpu().numpy()
        return queries

    def mean_queries(self, block: int) -> Float32Array:
        """See ``LayerProbe.mean_queries``."""
        return _block_means(self._queries, block)

    def mean_keys(self, block: int) -> Float32Array:
        """See ``LayerProbe.mean_keys``."""
        return _block_means(self._keys, block)


def _block_means(vectors: torch.Tensor, block: int) -> Float32Array:
    """Return the means of blocks of [n, heads, head_dim]: [heads, blocks, head_dim]."""
    starts = range(0, len(vectors), block)
    means = [vectors[start : start + block].mean(dim=0) for start in starts]
    stacked: Float32Array = torch.stack(means, dim=1).cpu().numpy()
    return stacked
