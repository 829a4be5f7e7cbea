"""Dense attention over slots in torch: a query sees every key before it, or those in a window.

Requests with a plan of their own are left to part_attention.py.

Works on any device. Nothing runs row by row: a prefill chunk is one call, and decodes of similar
length share a call.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from midfill.runners.forward.batch import ForwardBatch

IntArray = npt.NDArray[np.integer]
Window = int | None
"""How many keys a query sees, its own included; None means all."""
_SINK_WIDTH = 8
"""Numbers that carry a sink: fused kernels want vectors of a multiple of 8."""


@dataclass(frozen=True)
class KeyView:
    """The keys that a group's queries attend to under one window.

    Attributes:
        slots: [requests, keys] int64; short requests are padded with slot 0.
        mask: [requests, 1, queries, keys] bool, True where a query sees a key; None if no mask is
            needed.
        causal: without a mask, whether query i sees keys 0..i of as many keys; otherwise every
            query sees every key.
    """

    slots: torch.Tensor
    mask: torch.Tensor | None
    causal: bool


@dataclass(frozen=True)
class AttentionGroup:
    """Requests with the same number of new rows, computed in one call.

    Attributes:
        rows: [requests, queries] int64, rows of the packed batch.
        views: the keys, for each window that some layer has.
    """

    rows: torch.Tensor
    views: Mapping[Window, KeyView]


@dataclass(frozen=True)
class AttentionMetadata:
    """Which keys each row of a batch attends to.

    Attributes:
        groups: together they hold every row once, except those of requests with a plan.
    """

    groups: tuple[AttentionGroup, ...]


def prepare_metadata(
    batch: ForwardBatch, windows: Collection[Window], device: torch.device
) -> AttentionMetadata:
    """Group a batch's requests and determine, once for all layers, which keys each query sees.

    Args:
        batch: the step.
        windows: every window that some layer has.
        device: where the tensors go.
    """
    groups = []
    slots_seen = batch.slots_seen()
    for members in _members(batch):
        rows = np.stack([_span(batch.query_indptr, request) for request in members])
        seen = slots_seen[rows]
        views = {window: _key_view(batch, members, seen, window, device) for window in windows}
        groups.append(AttentionGroup(_to_device(rows, device), views))
    return AttentionMetadata(tuple(groups))


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    metadata: AttentionMetadata,
    window: Window,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the attention of a batch's rows in one layer.

    Args:
        queries: [rows, query_heads, head_dim].
        keys, values: the layer's KV cache [slots, kv_heads, head_dim], the batch's rows written.
        metadata: from ``prepare_metadata``.
        window: of this layer.
        scale: factor of q.k.
        sinks: [query_heads], the layer's; None if it has none.

    Returns:
        [rows, query_heads, head_dim]; undefined for rows of requests with a plan.
    """
    outputs = torch.empty_like(queries)
    for group in metadata.groups:
        view = group.views[window]
        q, k, v = queries[group.rows], keys[view.slots], values[view.slots]
        if sinks is not None:
            q, k, v, view = _with_sink(q, k, v, view, sinks.float() / scale)
        outputs[group.rows] = _attend_group(q, k, v, view, scale)
    return outputs


def _attend_group(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: KeyView, scale: float
) -> torch.Tensor:
    """Compute attention of [requests, queries, heads, head_dim] over [requests, keys, ...]."""
    requests, rows, heads, width = queries.shape
    kv_heads, head_dim = keys.shape[2], values.shape[3]
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if rows == 1:
        # The query heads of a group stand in for rows, so K and V are read once and not copied.
        queries = queries.view(requests, kv_heads, heads // kv_heads, width)
    else:
        queries = queries.transpose(1, 2)
        keys = keys.repeat_interleave(heads // kv_heads, dim=1)
        values = values.repeat_interleave(heads // kv_heads, dim=1)
    attended = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=view.mask, is_causal=view.causal, scale=scale
    )
    if rows == 1:
        return attended.reshape(requests, 1, heads, head_dim)
    return attended.transpose(1, 2)


def _with_sink(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    view: KeyView,
    sinks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, KeyView]:
    """Return the arguments of ``_attend_group`` with a last key whose score is the sink.

    Queries and keys get further numbers, of which one isn't 0: of queries their head's sink over
    the scale, of that key 1. So a fused kernel computes it all. The key's value is 0, and every
    query sees it.
    """
    requests, rows = queries.shape[:2]
    further = sinks.new_zeros(len(sinks), _SINK_WIDTH)
    further[:, 0] = sinks
    further = further.to(queries.dtype).expand(requests, rows, -1, -1)
    queries = torch.cat((queries, further), dim=-1)
    keys = functional.pad(keys, (0, _SINK_WIDTH, 0, 0, 0, 1))
    keys[:, -1, :, -_SINK_WIDTH] = 1
    mask = view.mask
    if view.causal:
        count = keys.shape[1] - 1
        mask = torch.ones(rows, count, dtype=torch.bool, device=keys.device).tril()[None, None]
    if mask is not None:
        mask = functional.pad(mask, (0, 1), value=True)
    values = functional.pad(values, (0, 0, 0, 0, 0, 1))
    return queries, keys, values, KeyView(view.slots, mask, causal=False)


def _members(batch: ForwardBatch) -> Iterator[list[int]]:
    """Yield the requests of each group: one prefill chunk, or decodes of similar length.

    The longest KV of a group's decodes is at most twice the shortest.
    """
    queries = np.diff(batch.query_indptr)
    lengths = batch.slots_seen()[batch.query_indptr[1:] - 1] if batch.rows else queries
    queries[[number for number, _ in batch.plans()]] = 0
    yield from ([int(request)] for request in np.flatnonzero(queries > 1))
    decodes = np.flatnonzero(queries == 1)
    group: list[int] = []
    for request in decodes[np.argsort(lengths[decodes], kind="stable")]:
        if group and lengths[request] > 2 * lengths[group[0]]:
            yield group
            group = []
        group.append(int(request))
    if group:
        yield group


def _key_view(
    batch: ForwardBatch, members: list[int], seen: IntArray, window: Window, device: torch.device
) -> KeyView:
    """Return the keys of some requests; ``seen`` [requests, queries] of their slots."""
    slots = [
        batch.kv_slots[batch.kv_indptr[request] :][: counts[-1]]
        for request, counts in zip(members, seen, strict=True)
    ]
    if window is not None:
        # Keys that even the first query no longer sees are not read.
        unseen = np.maximum(seen[:, 0] - window, 0)
        slots = [keys[first:] for keys, first in zip(slots, unseen, strict=True)]
        seen = seen - unseen[:, None]
    queries, most = seen.shape[1], int(seen.max())
    padded = np.zeros((len(members), most), np.int64)
    for row, keys in zip(padded, slots, strict=True):
        row[: len(keys)] = keys
    narrow = window is None or most <= window
    every_key = queries == 1 and narrow and bool((seen == most).all())
    causal = queries > 1 and narrow and bool((seen == np.arange(1, queries + 1)).all())
    mask = None if every_key or causal else _mask(seen, window, device)
    return KeyView(_to_device(padded, device), mask, causal)


def _mask(seen: IntArray, window: Window, device: torch.device) -> torch.Tensor:
    """Return [requests, 1, queries, keys] bool, given how many keys each query sees."""
    key = torch.arange(int(seen.max()), device=device)
    ends = _to_device(seen, device)[:, :, None]
    mask = key < ends
    if window is not None:
        mask &= key >= ends - window
    return mask[:, None]


def _span(indptr: IntArray, request: int) -> IntArray:
    return np.arange(indptr[request], indptr[request + 1])


def _to_device(array: IntArray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64, copy=False)).to(device, non_blocking=True)
