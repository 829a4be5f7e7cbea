"""What a layer's router decides: which experts each row is sent to, and how much they count."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from midfill.models.config import Experts
from midfill.runners.torch.weights import ExpertWeights


@dataclass(frozen=True)
class Routing:
    """The decision for some rows.

    Attributes:
        chosen: [rows, per_token] int64, experts, the likeliest first.
        weights: [rows, per_token] float32, what their outputs are multiplied by.
        shares: [rows, experts] float32, the probabilities of all experts.
    """

    chosen: torch.Tensor
    weights: torch.Tensor
    shares: torch.Tensor


def route(experts: Experts, layer: ExpertWeights, hidden: torch.Tensor) -> Routing:
    """Have a layer's router choose; see ``Experts``.

    Args:
        experts: of the model.
        layer: the router.
        hidden: [rows, hidden], normed.
    """
    scores = functional.linear(hidden, layer.router.weight, layer.router.bias).float()
    shares = scores.sigmoid() if experts.scoring == "sigmoid" else scores.softmax(dim=-1)
    preferred = scores if layer.correction is None else shares + layer.correction
    preferred = _within_groups(experts, preferred)
    chosen = preferred.sort(dim=-1, descending=True, stable=True).indices[:, : experts.per_token]
    weights = shares.gather(1, chosen)
    if experts.normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Routing(chosen, weights * experts.weight_factor, shares)


def _within_groups(experts: Experts, preferred: torch.Tensor) -> torch.Tensor:
    """Return [rows, experts] with -inf for experts outside of the groups that a row is sent to."""
    if experts.groups == 1:
        return preferred
    by_group = preferred.view(len(preferred), experts.groups, -1)
    best = by_group.topk(2 if experts.corrected else 1, dim=-1).values.sum(dim=-1)
    order = best.sort(dim=-1, descending=True, stable=True).indices
    outside = torch.ones_like(best, dtype=torch.bool)
    outside.scatter_(1, order[:, : experts.groups_per_token], False)
    return by_group.masked_fill(outside[..., None], -torch.inf).flatten(1)
