"""Decoder: the forward pass of every family in plain torch, on any device.

This is the reference that other implementations are tested against, and what runs on CUDA. Rows
of all requests are packed; the layer loop is open, so that a caller may run a range of layers and
change the rows between them.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from midfill.arrays import Int32Array
from midfill.attention.dense import AttentionGroup, attend, plan_attention
from midfill.forward.batch import ForwardBatch
from midfill.models.config import ModelConfig
from midfill.runners.rope import rope_tables
from midfill.runners.torch_weights import Affine, DecoderWeights, LayerWeights


@dataclass(frozen=True)
class Cells:
    """The KV cells of all slots.

    Attributes:
        keys, values: [layers, slots, kv_heads, head_dim]; keys are stored after the rotary
            embedding.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def empty(
        cls, config: ModelConfig, slots: int, device: torch.device, dtype: torch.dtype
    ) -> "Cells":
        """Cells of zeros: what padding reads must be finite, or 0 * NaN would spread."""
        shape = (config.layers, slots, config.kv_heads, config.head_dim)
        return cls(
            torch.zeros(shape, device=device, dtype=dtype),
            torch.zeros(shape, device=device, dtype=dtype),
        )

    @property
    def bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True)
class BatchState:
    """What the layers need to know of a batch, on the decoder's device.

    Attributes:
        cos, sin: [rows, 1, head_dim / 2] float32, of each row's position.
        write_slots: [rows] int64.
        groups: who attends to what.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    write_slots: torch.Tensor
    groups: tuple[AttentionGroup, ...]


class Decoder:
    """Weights and the computation over them; KV goes into the cells it is given.

    Args:
        config: the architecture.
        weights: all on one device and of one dtype, which hidden rows then have too.
        cells: on the same device.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, cells: Cells) -> None:
        self.config = config
        self.weights = weights
        self.cells = cells
        self.device = weights.embed.device
        cos, sin = rope_tables(config, config.context)
        self._cos = torch.from_numpy(cos).to(self.device)
        self._sin = torch.from_numpy(sin).to(self.device)
        self._windows = {config.window_of(layer) for layer in range(config.layers)}

    def prepare(self, batch: ForwardBatch) -> BatchState:
        """Bring to the device, once for all layers, what they need to know of a batch."""
        positions = self._indices(batch.positions)
        return BatchState(
            cos=self._cos[positions][:, None],
            sin=self._sin[positions][:, None],
            write_slots=self._indices(batch.write_slots),
            groups=plan_attention(batch, self._windows, self.device),
        )

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden rows before the first layer, [rows, hidden]."""
        hidden = functional.embedding(self._indices(batch.token_ids), self.weights.embed)
        return hidden * self.config.embedding_multiplier

    def run_layers(
        self, hidden: torch.Tensor, state: BatchState, first: int, end: int
    ) -> torch.Tensor:
        """Hidden rows [rows, hidden] after layers first <= i < end, whose K and V are written."""
        multiplier = self.config.residual_multiplier
        for index in range(first, end):
            layer = self.weights.layers[index]
            attended = self._attention(index, layer, self._norm(hidden, layer.attn_norm), state)
            hidden = hidden.add(attended, alpha=multiplier)
            expanded = self._mlp(layer, self._norm(hidden, layer.mlp_norm))
            hidden = hidden.add(expanded, alpha=multiplier)
        return hidden

    def logits(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Logits [outputs, vocab] float32 of the rows the batch wants them for."""
        rows = hidden[self._indices(batch.logit_rows)]
        logits = functional.linear(self._norm(rows, self.weights.final_norm), self.weights.head)
        return logits.float() / self.config.logits_divisor

    def _attention(
        self, index: int, layer: LayerWeights, hidden: torch.Tensor, state: BatchState
    ) -> torch.Tensor:
        config = self.config
        keys, values = self.cells.keys[index], self.cells.values[index]
        heads = [config.query_heads, config.kv_heads, config.kv_heads]
        qkv = _linear(hidden, layer.qkv).view(-1, sum(heads), config.head_dim)
        q, k, v = torch.split(qkv, heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        q, k = _rotate(q, state), _rotate(k, state)
        keys[state.write_slots] = k
        values[state.write_slots] = v
        window = config.window_of(index)
        attended = attend(q, keys, values, state.groups, window, config.score_scale)
        return _linear(attended.flatten(1), layer.o)

    def _mlp(self, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        up = _linear(hidden, layer.up)
        if not self.config.gated_mlp:
            return _linear(self._activate(up), layer.down)
        gate, up = up.chunk(2, dim=-1)
        return _linear(self._activate(gate) * up, layer.down)

    def _activate(self, values: torch.Tensor) -> torch.Tensor:
        match self.config.activation:
            case "silu":
                return functional.silu(values)
            case "gelu":
                return functional.gelu(values)
            case "gelu_tanh":
                return functional.gelu(values, approximate="tanh")

    def _norm(self, values: torch.Tensor, norm: Affine) -> torch.Tensor:
        """The norm of the last dimension, computed in float32 whatever the dtype."""
        size, epsilon = norm.weight.shape, self.config.norm_epsilon
        if self.config.norm == "layer":
            return functional.layer_norm(values, size, norm.weight, norm.bias, epsilon)
        return functional.rms_norm(values, size, norm.weight, epsilon)

    def _indices(self, array: Int32Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, torch.int64, non_blocking=True)


def _linear(values: torch.Tensor, affine: Affine) -> torch.Tensor:
    return functional.linear(values, affine.weight, affine.bias)


def _rotate(heads: torch.Tensor, state: BatchState) -> torch.Tensor:
    """The rotary embedding of [rows, heads, head_dim], in float32."""
    first, second = heads.float().chunk(2, dim=-1)
    rotated = (first * state.cos - second * state.sin, second * state.cos + first * state.sin)
    return torch.cat(rotated, dim=-1).to(heads.dtype)
