"""Layers with the gated delta rule, in plain torch: each request's rows one after the other.

The equations are at ``models.config.DeltaRule``. States are float32, whatever the weights are; of a
head, ``TorchStates.matrices`` has S, [head_dim, state_dim].
"""

import torch
from torch.nn import functional

from midfill.models.config import DeltaRule
from midfill.runners.torch.state_space import StateRows, TorchStates, convolve_rows
from midfill.runners.torch.weights import DeltaRuleWeights

_EPSILON = 1e-6
"""Added to the square of a key's or query's length."""


def apply_delta_rule(
    rule: DeltaRule,
    weights: DeltaRuleWeights,
    states: TorchStates,
    layer: int,
    projected: torch.Tensor,
    requests: tuple[StateRows, ...],
    norm_epsilon: float,
) -> torch.Tensor:
    """Return norm(y) * silu(z) of a batch's rows, [rows, inner] float32; states advance.

    Args:
        rule: the model's.
        weights: of the layer.
        states: of all sequences.
        layer: its number among those with a state.
        projected: [rows, projected], W_in of the hidden rows: z, q, k, v, b and a.
        requests: all of the batch.
        norm_epsilon: of the norm.
    """
    sizes = [rule.inner, rule.mixed, rule.heads, rule.heads]
    z, mixed, b, a = torch.split(projected.float(), sizes, dim=1)
    factors = torch.exp(weights.decay * functional.softplus(a + weights.dt_bias))
    outputs = torch.cat(
        [
            _apply_to_request(rule, weights, states, layer, mixed, b.sigmoid(), factors, request)
            for request in requests
        ]
    )
    norm = weights.norm.weight.float()
    normed = functional.rms_norm(outputs, norm.shape, norm, norm_epsilon)
    return normed.flatten(1) * functional.silu(z)


def _apply_to_request(
    rule: DeltaRule,
    weights: DeltaRuleWeights,
    states: TorchStates,
    layer: int,
    mixed: torch.Tensor,
    betas: torch.Tensor,
    factors: torch.Tensor,
    request: StateRows,
) -> torch.Tensor:
    """Return y of one request's rows: [rows, heads, head_dim]."""
    rows = convolve_rows(states.inputs[request.state, layer], mixed, request, weights.conv, None)
    keys = rule.key_heads * rule.state_dim
    q, k, v = torch.split(rows, [keys, keys, rule.inner], dim=1)
    q, k = _unit(_by_head(rule, q)) * rule.state_dim**-0.5, _unit(_by_head(rule, k))
    v = v.view(len(rows), rule.heads, rule.head_dim)
    matrices = states.matrices[request.state, layer]
    outputs = torch.empty_like(v)
    for number, row in enumerate(range(request.first, request.end)):
        matrices.mul_(factors[row, :, None, None])
        recalled = torch.einsum("hvk,hk->hv", matrices, k[number])
        added = betas[row, :, None] * (v[number] - recalled)
        matrices.add_(added[:, :, None] * k[number, :, None])
        outputs[number] = torch.einsum("hvk,hk->hv", matrices, q[number])
    return outputs


def _by_head(rule: DeltaRule, rows: torch.Tensor) -> torch.Tensor:
    """Return queries or keys [rows, key_heads * state_dim] as [rows, heads, state_dim]."""
    heads = rows.view(len(rows), rule.key_heads, rule.state_dim)
    served = rule.heads // rule.key_heads
    if rule.tiled:
        return heads.repeat(1, served, 1)
    return heads.repeat_interleave(served, dim=1)


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    """Scale vectors to length 1."""
    return vectors * torch.rsqrt(vectors.square().sum(dim=-1, keepdim=True) + _EPSILON)
