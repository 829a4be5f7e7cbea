"""Hidden rows of several streams in torch; see ``models.altup.AltUp`` for the equations.

A row is all four streams, then what each layer adds of the token's own embeddings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import torch
from torch.nn import functional

from midfill.models.altup import STREAMS, AltUp
from midfill.runners.torch.weights import Affine, AltUpLayerWeights, AltUpWeights

_LEAST_SQUARE = 1e-5
"""Of a projected stream's numbers, on average, before it is brought to the first one's length."""

Rows = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StreamNorms:
    """RMSNorms with an epsilon, in float32 whatever the dtype."""

    epsilon: float

    def norm(self, values: torch.Tensor, norm: Affine) -> torch.Tensor:
        return functional.rms_norm(values, norm.weight.shape, norm.weight, self.epsilon)

    def route(self, weights: AltUpLayerWeights, rows: torch.Tensor) -> torch.Tensor:
        """Return r(x) of rows [rows, hidden]: [rows, STREAMS]."""
        normed = self.norm(rows, weights.router_norm) / rows.shape[-1]
        return torch.tanh(functional.linear(normed, weights.router).float()).to(rows.dtype)


def start_rows(
    altup: AltUp, weights: AltUpWeights, norms: StreamNorms, tokens: torch.Tensor, h: torch.Tensor
) -> torch.Tensor:
    """Return a text's first rows [rows, row_width].

    Args:
        altup: the model's.
        weights: of what is outside of layers.
        norms: with the model's epsilon.
        tokens: [rows] int64.
        h: the tokens' embeddings [rows, hidden].
    """
    streams = [h, *(_as_long_as(h, functional.linear(h, each)) for each in weights.spread)]
    looked_up = torch.where(tokens < altup.layer_vocab, tokens, 0)
    own = functional.embedding(looked_up, weights.layer_embed) * sqrt(altup.layer_width)
    projected = functional.linear(h, weights.layer_project) / sqrt(h.shape[-1])
    by_layer = projected.view(len(h), -1, altup.layer_width)
    inputs = (norms.norm(by_layer, weights.layer_project_norm).flatten(1) + own) / sqrt(2)
    return torch.cat((*streams, inputs), dim=-1)


def run_layer(
    weights: AltUpLayerWeights,
    norms: StreamNorms,
    rows: torch.Tensor,
    number: int,
    *,
    before: Rows,
    attention: Rows,
    mlp: Rows,
    activate: Rows,
) -> torch.Tensor:
    """Return the rows [rows, row_width] that a layer leaves.

    Args:
        weights: of the layer, beside attention and its MLP.
        norms: with the model's epsilon.
        rows: as the layer before left them.
        number: of the layer.
        before: the norm before attention; [rows, hidden], like all of these.
        attention: of normed rows, its output normed.
        mlp: of rows that aren't normed yet, its output normed.
        activate: the MLP's activation.
    """
    streams, inputs = split_rows(rows, weights.scale.shape[0])
    width = weights.layer_gate.weight.shape[0]
    predicted = _predict(weights, norms, streams)
    active = predicted[:, 0]
    normed = before(active)
    low = functional.linear(normed, weights.laurel_left)
    kept = normed + norms.norm(functional.linear(low, weights.laurel_right), weights.laurel_norm)
    attended = (active + attention(normed) + kept) / sqrt(2)
    computed = attended + mlp(attended)
    steps = functional.linear(norms.route(weights, computed), weights.correct) + 1.0
    corrected = predicted + steps[:, :, None] * (computed - active)[:, None]
    gate = functional.linear(corrected[:, 0] * weights.scale, weights.layer_gate.weight)
    own = activate(gate) * inputs[:, number * width : (number + 1) * width]
    added = norms.norm(functional.linear(own, weights.layer_out), weights.layer_norm)
    corrected[:, 1:] += added[:, None]
    return torch.cat((corrected.flatten(1), inputs), dim=-1)


def finish_rows(weights: AltUpWeights, rows: torch.Tensor) -> torch.Tensor:
    """Return the average [rows, hidden] of the streams that the last layer left."""
    streams, _ = split_rows(rows, weights.gather[0].shape[0])
    first = streams[:, 0]
    others = [
        _as_long_as(first, functional.linear(streams[:, number], matrix))
        for number, matrix in enumerate(weights.gather, 1)
    ]
    return torch.stack((first, *others)).mean(0)


def split_rows(rows: torch.Tensor, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows' streams [rows, STREAMS, hidden], and what layers add to them."""
    at = STREAMS * hidden
    return rows[:, :at].view(-1, STREAMS, hidden), rows[:, at:]


def _predict(weights: AltUpLayerWeights, norms: StreamNorms, streams: torch.Tensor) -> torch.Tensor:
    """Return p of all streams [rows, STREAMS, hidden]."""
    routed = norms.route(weights, streams[:, 0])
    mixing = functional.linear(routed, weights.predict).view(-1, STREAMS, STREAMS)
    return streams + mixing @ streams


def _as_long_as(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return other rows [rows, hidden], each brought to the length that one of ``rows`` has."""
    wanted = rows.square().mean(-1, keepdim=True).sqrt()
    found = others.square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()
    return others * wanted / found
