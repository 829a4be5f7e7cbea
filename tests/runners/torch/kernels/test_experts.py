"""All experts at once against one after the other, for few rows and for many."""

import pytest
import torch
from torch.nn import functional
from triton_device import TRITON_DEVICE, needs_triton

from midfill.runners.torch.weights import Affine, MlpWeights

pytestmark = needs_triton
EXPERTS, PER_TOKEN, HIDDEN, FFN, LIMIT = 6, 2, 48, 40, 0.9


def experts(*, biased: bool) -> MlpWeights:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    up, down = drawn(EXPERTS, 2 * FFN, HIDDEN), drawn(EXPERTS, HIDDEN, FFN)
    biases = (drawn(EXPERTS, 2 * FFN), drawn(EXPERTS, HIDDEN)) if biased else (None, None)
    return MlpWeights(Affine(up, biases[0]), Affine(down, biases[1]))


def on(device: str, mlp: MlpWeights) -> MlpWeights:
    moved = [
        Affine(each.weight.to(device), None if each.bias is None else each.bias.to(device))
        for each in (mlp.up, mlp.down)
    ]
    return MlpWeights(*moved)


def activated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
        return gate * torch.sigmoid(1.702 * gate) * up
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="none" if activation == "gelu" else "tanh") * up


@pytest.mark.parametrize(
    ("activation", "biased"),
    [("silu", False), ("gelu", False), ("gelu_tanh", False), ("swiglu_oai", True)],
)
@pytest.mark.parametrize(("rows", "used"), [(1, 6), (5, 6), (70, 6), (70, 1), (200, 3)])
def test_rows_get_what_their_experts_make_of_them(
    rows: int, used: int, activation: str, biased: bool
) -> None:
    from midfill.runners.torch.kernels.experts import expand_experts

    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn((rows, HIDDEN), generator=generator)
    chosen = torch.stack(
        [torch.randperm(EXPERTS, generator=generator)[:PER_TOKEN] % used for _ in range(rows)]
    )
    weights = torch.rand((rows, PER_TOKEN), generator=generator)
    mlp = experts(biased=biased)
    expected = torch.zeros_like(hidden)
    for row in range(rows):
        for expert, weight in zip(chosen[row], weights[row], strict=True):
            up = functional.linear(
                hidden[row], mlp.up.weight[expert], None if not biased else mlp.up.bias[expert]
            )
            inner = activated(*up.chunk(2), activation)
            expected[row] += weight * functional.linear(
                inner, mlp.down.weight[expert], None if not biased else mlp.down.bias[expert]
            )
    moved = (each.to(TRITON_DEVICE) for each in (hidden, chosen, weights))
    found = expand_experts(*moved, on(TRITON_DEVICE, mlp), activation, LIMIT)
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-4)
