"""Attention over keys in two groups, in torch: the plain form of ``runners.forward.groups``."""

from dataclasses import dataclass

import numpy as np
import torch

from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.groups import KeyGroup


@dataclass(frozen=True)
class GroupedRequest:
    """The rows of a request whose first keys are a group.

    Attributes:
        rows: [queries] int64, rows of the packed batch.
        slots: [keys] int64.
        hidden: [queries, keys] bool, which keys a row doesn't see.
        group: the first keys.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    hidden: torch.Tensor
    group: KeyGroup


def prepare_groups(batch: ForwardBatch, device: torch.device) -> tuple[GroupedRequest, ...]:
    """Return the batch's requests with a group, once for all layers."""
    return tuple(
        _prepare(batch, request, group, device)
        for request, group in enumerate(batch.groups)
        if group is not None
    )


def _prepare(
    batch: ForwardBatch, request: int, group: KeyGroup, device: torch.device
) -> GroupedRequest:
    rows = np.arange(batch.query_indptr[request], batch.query_indptr[request + 1])
    slots = batch.kv_slots[batch.kv_indptr[request] : batch.kv_indptr[request + 1]]
    hidden = np.arange(len(slots)) >= batch.slots_seen()[rows][:, None]
    return GroupedRequest(
        torch.from_numpy(rows).to(device, torch.int64),
        torch.from_numpy(slots).to(device, torch.int64),
        torch.from_numpy(hidden).to(device),
        group,
    )


def attend_groups(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    request: GroupedRequest,
    scale: float,
) -> torch.Tensor:
    """Compute a request's attention in one layer.

    Args:
        queries: [rows of the batch, query_heads, head_dim].
        keys, values: the layer's KV cache [slots, kv_heads, head_dim], the batch's rows written.
        request: from ``prepare_groups``.
        scale: factor of q.k.

    Returns:
        [queries, query_heads, head_dim].
    """
    q = queries[request.rows].float()
    rows, heads, head_dim = q.shape
    q = q.view(rows, keys.shape[1], -1, head_dim)
    k, v = keys[request.slots].float(), values[request.slots].float()
    scores = torch.einsum("rhgd,khd->hgrk", q, k) * scale
    scores = scores.masked_fill(request.hidden, -torch.inf)
    group, count = request.group, request.group.keys
    inside, others = scores[..., :count] / group.temperature, scores[..., count:]
    attended = [
        torch.einsum("hgrk,khd->rhgd", part.softmax(-1), own)
        for part, own in ((inside, v[:count]), (others, v[count:]))
    ]
    share = torch.sigmoid(group.power * inside.logsumexp(-1) - others.logsumexp(-1))
    share = share.permute(2, 0, 1)[..., None]
    mixed = share * attended[0] + (1 - share) * attended[1]
    return mixed.reshape(rows, heads, head_dim).to(queries.dtype)
