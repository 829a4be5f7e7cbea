"""Attention over cells in torch: a request sees other tokens in each layer and head.

The plain form of what ``kv.ragged`` describes, one request at a time: the reference for the
CPU kernels, and what runs on CUDA.
"""

from dataclasses import dataclass

import numpy as np
import torch

from midfill.kv.ragged import KeyTerms, RaggedIndex
from midfill.runners.forward.batch import ForwardBatch


@dataclass(frozen=True)
class RaggedRequest:
    """The rows of a request with cells, and what they attend to.

    Attributes:
        rows: [queries] int64, rows of the packed batch.
        own: [n] int64, the slots after the cells.
        seen: [queries] int64, how many of these each row sees, its own the last of them.
        cells: [layers, kv_heads, most] int64, padded with cell 0.
        kept: [layers, kv_heads, 1] int64, how many are cells.
        terms: [3, layers, kv_heads, most] float32: score factors, score biases, value factors.
    """

    rows: torch.Tensor
    own: torch.Tensor
    seen: torch.Tensor
    cells: torch.Tensor
    kept: torch.Tensor
    terms: torch.Tensor


def prepare_ragged(
    batch: ForwardBatch, shape: torch.Size, device: torch.device
) -> tuple[RaggedRequest, ...]:
    """Return the batch's requests with cells, once for all layers.

    Args:
        batch: the step.
        shape: of the KV cache: [layers, slots, kv_heads, head_dim].
        device: where the tensors go.
    """
    return tuple(
        _prepare(batch, request, index, shape[2], device)
        for request, index in enumerate(batch.ragged)
        if index is not None
    )


def attend_ragged(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    request: RaggedRequest,
    layer: int,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """Compute a request's attention in one layer.

    Args:
        queries: [rows of the batch, query_heads, head_dim].
        keys, values: the whole KV cache [layers, slots, kv_heads, head_dim], the batch's rows
            written.
        request: from ``prepare_ragged``.
        layer: which one.
        window: how many of its last keys a query sees, its own included; None is all.
        scale: factor of q.k.

    Returns:
        [queries, query_heads, head_dim].
    """
    q = queries[request.rows].float()
    rows, heads, head_dim = q.shape
    kv_heads = keys.shape[2]
    q = q.view(rows, kv_heads, heads // kv_heads, head_dim)
    cells, kept = request.cells[layer], request.kept[layer]
    k, v = (_gather(cache, layer, cells, request.own) for cache in (keys, values))
    most, own = cells.shape[1], len(request.own)
    factor, bias, weight = (
        _padded(term, own, fill)
        for term, fill in zip(request.terms[:, layer], (1.0, 0.0, 1.0), strict=True)
    )
    scores = torch.einsum("rhgd,hkd->hgrk", q, k) * scale
    scores = scores * factor[:, None, None] + bias[:, None, None]
    seen = _visible(request.seen, most, own, kept, window)
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    attended = torch.einsum("hgrk,hkd->rhgd", weights * weight[:, None, None], v)
    return attended.reshape(rows, heads, head_dim).to(queries.dtype)


def _gather(
    cache: torch.Tensor, layer: int, cells: torch.Tensor, own: torch.Tensor
) -> torch.Tensor:
    """Return [kv_heads, cells and own slots, head_dim] float32."""
    found = cache[cell_places(cells, cache.shape)]
    return torch.cat((found, cache[layer, own].transpose(0, 1)), dim=1).float()


def cell_places(
    cells: torch.Tensor, shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the layers, slots and heads of cells in a cache [layers, slots, kv_heads, ...]."""
    _, slots, heads, *_ = shape
    row = cells // slots
    return row // heads, cells % slots, row % heads


def _padded(term: torch.Tensor, own: int, fill: float) -> torch.Tensor:
    return torch.cat((term, term.new_full((len(term), own), fill)), dim=1)


def _visible(
    slots_seen: torch.Tensor, most: int, own: int, kept: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Return which keys each row sees, as bool [kv_heads, rows, keys]."""
    column = torch.arange(most + own, device=kept.device)
    is_cell = column < most
    # A head's keys are numbered without its padding.
    number = torch.where(is_cell, column, kept + column - most)
    exists = ~is_cell | (column < kept)
    row = kept[:, None] + slots_seen[:, None] - 1
    seen = exists[:, None] & (number[:, None] <= row)
    return seen if window is None else seen & (number[:, None] > row - window)


def _prepare(
    batch: ForwardBatch, request: int, index: RaggedIndex, kv_heads: int, device: torch.device
) -> RaggedRequest:
    counts = np.diff(index.indptr)
    most = index.most
    terms = index.terms or KeyTerms.neutral(len(index.cells))
    arrays = (index.cells, terms.score_factor, terms.score_bias, terms.value_factor)
    padded = [np.zeros((len(counts), most), array.dtype) for array in arrays]
    for target, array in zip(padded, arrays, strict=True):
        for row, (start, count) in enumerate(zip(index.indptr, counts, strict=False)):
            target[row, :count] = array[start : start + count]
    shape = (-1, kv_heads, most)
    rows = np.arange(batch.query_indptr[request], batch.query_indptr[request + 1])
    own = batch.kv_slots[batch.kv_indptr[request] : batch.kv_indptr[request + 1]]
    return RaggedRequest(
        rows=torch.from_numpy(rows).to(device, torch.int64),
        own=torch.from_numpy(own).to(device, torch.int64),
        seen=torch.from_numpy(batch.slots_seen()[rows]).to(device, torch.int64),
        cells=torch.from_numpy(padded[0].reshape(shape)).to(device, torch.int64),
        kept=torch.from_numpy(counts.reshape(-1, kv_heads, 1)).to(device, torch.int64),
        terms=torch.from_numpy(np.stack(padded[1:]).reshape(3, *shape)).to(device),
    )
