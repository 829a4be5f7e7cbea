"""Attention over plans as its definition says it, row by row: the reference of every kernel."""

from types import SimpleNamespace

import numpy as np
import torch

from midfill.arrays import Int32Array
from midfill.kv.ragged import KeyTerms, RaggedIndex, cells_of_slots
from midfill.runners.forward.attention import QUERY_BLOCK, AttentionPlan, KeyPart, SpanLists
from midfill.runners.forward.batch import ForwardBatch


def naive_attention(
    batch: ForwardBatch,
    layer: int,
    window: int | None,
    scale: float,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Return [rows, query_heads, head_dim] float64 of queries of that shape over a whole cache.

    ``keys`` and ``values`` are [layers, slots, kv_heads, head_dim]. A request without a plan sees
    its slots. Listers are shown a probe that knows numbers only.
    """
    slots, kv_heads = keys.shape[1:3]
    flat = [cache.transpose(1, 2).reshape(-1, cache.shape[-1]).double() for cache in (keys, values)]
    outputs = torch.zeros(queries.shape, dtype=torch.float64)
    seen = batch.slots_seen()
    for request in range(batch.requests):
        first, end = batch.query_indptr[request : request + 2].tolist()
        own = batch.kv_slots[batch.kv_indptr[request] : batch.kv_indptr[request + 1]]
        plan = (batch.attention[request] if batch.attention else None) or AttentionPlan()
        parts = [*plan.parts, KeyPart(own, plan.cells, seen[first:end])]
        lists = None
        if plan.lister is not None and window is None:
            lists = _lists(plan, end - first, int(seen[end - 1]), layer, queries.shape[1], kv_heads)
        for row, head in np.ndindex(end - first, queries.shape[1]):
            place = layer * kv_heads + head // (queries.shape[1] // kv_heads)
            mixed, masses = [], []
            for part in parts:
                cells, terms = _seen(part, row, place, slots)
                listed = np.arange(len(cells))
                if window is not None:
                    listed = listed[-window:]
                if lists is not None and part is parts[-1]:
                    unit = row // QUERY_BLOCK * queries.shape[1] + head
                    spans = lists.spans[lists.indptr[unit] : lists.indptr[unit + 1]]
                    within = np.concatenate([np.arange(*span) for span in spans])
                    listed = within[within < len(cells)]
                if not len(listed):
                    continue
                k, v = (cache[cells[listed]] for cache in flat)
                factor, bias, weight = torch.from_numpy(terms[:, listed]).double()
                scores = k @ queries[first + row, head].double() * (scale / part.temperature)
                scores = scores * factor + bias
                mixed.append((scores.softmax(0) * weight) @ v)
                masses.append(part.scale * part.temperature * scores.logsumexp(0))
            shares = torch.stack(masses).softmax(0)
            outputs[first + row, head] = sum(a * b for a, b in zip(shares, mixed, strict=True))
    return outputs


def _lists(
    plan: AttentionPlan, rows: int, seen: int, layer: int, query_heads: int, kv_heads: int
) -> SpanLists:
    cells = 0
    if plan.cells is not None:
        cells = int(plan.cells.indptr[layer * kv_heads + 1] - plan.cells.indptr[layer * kv_heads])
    assert plan.lister is not None
    probe = SimpleNamespace(
        layer=layer, first=cells + seen - rows, rows=rows, query_heads=query_heads,
        kv_heads=kv_heads, scale=1.0,
    )  # fmt: skip
    return plan.lister.plan(probe)


def _seen(part: KeyPart, row: int, place: int, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """The cells of a part that a row sees in a head, and their terms [3, n]."""
    count = len(part.slots) if part.visible is None else int(part.visible[row])
    cells = place * slots + part.slots[:count].astype(np.int64)
    terms = np.tile([[1.0], [0.0], [1.0]], count)
    if part.cells is not None:
        kept, own = _head(part.cells, place)
        cells, terms = np.concatenate((kept, cells)), np.concatenate((own, terms), axis=1)
    return cells, terms


def _head(index: RaggedIndex, place: int) -> tuple[np.ndarray, np.ndarray]:
    span = slice(index.indptr[place], index.indptr[place + 1])
    terms = index.terms or KeyTerms.neutral(len(index.cells))
    arrays = (terms.score_factor, terms.score_bias, terms.value_factor)
    return index.cells[span], np.stack([term[span] for term in arrays])


def uniform_ragged_index(slots: Int32Array, heads: int, total_slots: int) -> RaggedIndex:
    """Return the index under which every layer and head keeps the same slots.

    Args:
        slots, heads, total_slots: see ``cells_of_slots``.
    """
    cells = cells_of_slots(slots, heads, total_slots).reshape(-1)
    indptr = np.arange(heads + 1, dtype=np.int32) * np.int32(len(slots))
    return RaggedIndex(cells, indptr)
