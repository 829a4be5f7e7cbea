"""States and Mamba-2 in plain torch: each request's rows one after the other.

The equations are at ``models.config.StateSpace``. States are float32, whatever the weights are.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from midfill.models.config import StateLayers, StateSpace
from midfill.runners.torch.weights import StateSpaceWeights


class TorchStates:
    """Implements ``kv.state_pool.StateStore``.

    Attributes:
        inputs: [states, layers, conv_width - 1, mixed], the convolutions' last inputs.
        matrices: [states, layers, heads, head_dim, state_dim].
    """

    def __init__(self, space: StateLayers, count: int, device: torch.device) -> None:
        layers = len(space.layers)
        kept = (space.conv_width - 1, space.mixed)
        heads = (space.heads, space.head_dim, space.state_dim)
        self.inputs = torch.zeros((count, layers, *kept), device=device)
        self.matrices = torch.zeros((count, layers, *heads), device=device)

    @property
    def count(self) -> int:
        """See ``StateStore.count``."""
        return len(self.inputs)

    @property
    def nbytes(self) -> int:
        """See ``StateStore.nbytes``."""
        return self.inputs.nbytes + self.matrices.nbytes

    def clear(self, state: int) -> None:
        """See ``StateStore.clear``."""
        self.inputs[state] = 0.0
        self.matrices[state] = 0.0

    def copy(self, source: int, target: int) -> None:
        """See ``StateStore.copy``."""
        self.inputs[target] = self.inputs[source]
        self.matrices[target] = self.matrices[source]


@dataclass(frozen=True)
class StateRows:
    """A request's rows first <= i < end of a batch, and its state."""

    first: int
    end: int
    state: int


def mix_rows(
    space: StateSpace,
    weights: StateSpaceWeights,
    states: TorchStates,
    layer: int,
    projected: torch.Tensor,
    requests: tuple[StateRows, ...],
) -> torch.Tensor:
    """Return y * silu(z) of a batch's rows, [rows, inner] float32; states advance.

    Args:
        space: the model's.
        weights: of the layer.
        states: of all sequences.
        layer: its number among those with a state.
        projected: [rows, projected], W_in of the hidden rows.
        requests: all of the batch.
    """
    sizes = [space.inner, space.mixed, space.heads]
    z, mixed, dt = torch.split(projected.float(), sizes, dim=1)
    steps = functional.softplus(dt + weights.dt_bias)
    outputs = [
        _mix_request(space, weights, states, layer, mixed, steps, request) for request in requests
    ]
    return torch.cat(outputs) * functional.silu(z)


def convolve_rows(
    kept: torch.Tensor,
    mixed: torch.Tensor,
    request: StateRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return SiLU of the convolution of one request's rows, [rows, mixed].

    Args:
        kept: [conv_width - 1, mixed], the last inputs before these rows; becomes the last of all.
        mixed: [rows of the batch, mixed], the inputs.
        request: the rows.
        weight: [mixed, conv_width].
        bias: [mixed].
    """
    inputs = torch.cat((kept, mixed[request.first : request.end]))
    kept.copy_(inputs[len(inputs) - len(kept) :])
    convolved = functional.conv1d(inputs.T[None], weight[:, None], bias, groups=len(weight))
    return functional.silu(convolved[0].T)


def _mix_request(
    space: StateSpace,
    weights: StateSpaceWeights,
    states: TorchStates,
    layer: int,
    mixed: torch.Tensor,
    steps: torch.Tensor,
    request: StateRows,
) -> torch.Tensor:
    """Return y of one request's rows: [rows, inner]."""
    matrices = states.matrices[request.state, layer]
    kept = states.inputs[request.state, layer]
    rows = convolve_rows(kept, mixed, request, weights.conv, weights.conv_bias)
    outputs = torch.empty((len(rows), space.heads, space.head_dim), device=rows.device)
    taken = steps[request.first : request.end]
    for number, (row, step) in enumerate(zip(rows, taken, strict=True)):
        x, b, c = torch.split(row, [space.inner, space.state_dim, space.state_dim])
        x = x.view(space.heads, space.head_dim)
        matrices.mul_(torch.exp(step * weights.decay)[:, None, None])
        matrices.add_((step[:, None] * x)[:, :, None] * b)
        outputs[number] = matrices @ c + weights.skip[:, None] * x
    return outputs.flatten(1)
