"""Decoder: the forward pass of every family in plain torch, on any device.

This is the reference that other implementations are tested against, and what runs on CUDA. Rows
of all requests are packed. A caller may run a range of layers and change the rows between them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch.nn import functional

from midfill.arrays import Float32Array, Int32Array
from midfill.models.config import (
    Activation,
    DeltaRule,
    LatentAttention,
    ModelConfig,
    StateSpace,
)
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.rope import model_tables
from midfill.runners.torch.altup import StreamNorms, finish_rows, run_layer, start_rows
from midfill.runners.torch.delta_rule import apply_delta_rule
from midfill.runners.torch.dense_attention import AttentionMetadata, attend, prepare_metadata
from midfill.runners.torch.experts.assignment import ExpertCosts
from midfill.runners.torch.experts.offloaded import ExpertOutput, OffloadedExperts
from midfill.runners.torch.experts.routing import Routing, route
from midfill.runners.torch.part_attention import PlannedRequest, attend_planned, prepare_plans
from midfill.runners.torch.state_space import StateRows, TorchStates, mix_rows
from midfill.runners.torch.weights import (
    Affine,
    AltUpLayerWeights,
    DecoderWeights,
    DeltaRuleWeights,
    ExpertWeights,
    LatentWeights,
    LayerWeights,
    MlpWeights,
    StateSpaceWeights,
)


@dataclass(frozen=True)
class KVCache:
    """K and V of all slots.

    Attributes:
        keys, values: [layers that keep KV, slots, kv_heads, head_dim]; keys are stored after the
            rotary embedding. One tensor where a value is the key itself.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def empty(
        cls, config: ModelConfig, slots: int, device: torch.device, dtype: torch.dtype
    ) -> "KVCache":
        """Return a cache of zeros: padding reads slot 0, and 0 * NaN would spread."""
        shape = (len(config.kv_layers), slots, config.kv_heads, config.head_dim)
        keys = torch.zeros(shape, device=device, dtype=dtype)
        return cls(keys, keys if config.vectors_per_cell == 1 else torch.zeros_like(keys))

    @property
    def bytes(self) -> int:
        return self.keys.nbytes * (1 if self.values is self.keys else 2)


_SWIGLU_OAI_ALPHA = 1.702
GroupedExperts = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, MlpWeights, Activation, float], torch.Tensor
]
"""See ``kernels.experts.expand_experts``."""

Turns = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of rotary angles."""


@dataclass(frozen=True)
class PreparedBatch:
    """What the layers need of a batch, on the decoder's device.

    Attributes:
        turns: cosines and sines [rows, 1, head_dim / 2] float32 of each row's position: in most
            layers, and in those with ``ModelConfig.is_local``.
        write_slots: [rows] int64.
        attention: which keys each row attends to.
        across_layers: whether both name slots of the whole cache, layer after layer, and not of
            the layer that runs: the batch names cells of other layers.
        planned: requests with a plan of their own.
        observed_rows: [n] int64, rows whose queries are kept.
        states: each request's rows and state, of models with states.
    """

    turns: tuple[Turns, Turns]
    write_slots: torch.Tensor
    attention: AttentionMetadata
    across_layers: bool
    planned: tuple[PlannedRequest, ...]
    observed_rows: torch.Tensor
    states: tuple[StateRows, ...]


class Decoder:
    """Weights, a KV cache and the computation over them.

    Args:
        config: the architecture.
        weights: all on one device and of one dtype, which hidden rows have too.
        kv_cache: on the same device.
        states: on the same device; None for models without.
        expert_slots: how many experts of each layer the device has room for, the others being in
            the machine's memory; None if it has all of them.
        expert_costs: see ``OffloadedExperts``.

    Attributes:
        grouped_experts: computes all experts of a layer at once (``kernels.experts``); None has
            them computed one after the other.
        offloaded: computes experts that the device hasn't room for; None if it has all of them.
        tables: cosines and sines [positions, head_dim / 2] float32 of most layers, and of those
            with ``ModelConfig.is_local``.
        observed: the rotated queries of the last batch's observed rows, [n, query_heads, head_dim]
            per layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        kv_cache: KVCache,
        states: TorchStates | None = None,
        *,
        expert_slots: int | None = None,
        expert_costs: ExpertCosts | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.kv_cache = kv_cache
        self.states = states
        # Where each layer's KV or state is among those of its kind.
        space = config.state_space
        kinds = (config.kv_layers, () if space is None else space.layers)
        numbers = {layer: number for kind in kinds for number, layer in enumerate(kind)}
        self._numbers = {i: numbers[config.kv_layer_of(i)] for i in range(config.layers)}
        self._stream_norms = StreamNorms(config.norm_epsilon)
        self.device = weights.embed.device
        self.observed: list[torch.Tensor] = [torch.empty(0)] * config.layers
        tables = [self._turns(table) for table in model_tables(config)]
        self.tables = (tables[0], tables[-1])
        self._windows = {config.window_of(layer) for layer in range(config.layers)}
        self.grouped_experts: GroupedExperts | None = None
        self.offloaded: OffloadedExperts | None = None
        if expert_slots is not None and config.experts is not None:
            mixtures = {
                number: layer.mlp
                for number, layer in enumerate(weights.layers)
                if isinstance(layer.mlp, ExpertWeights)
            }
            with torch.inference_mode():
                self.offloaded = OffloadedExperts(
                    config.experts, mixtures, self.device, expert_slots, self.expand,
                    costs=expert_costs,
                )  # fmt: skip

    def prepare(self, batch: ForwardBatch, first: int = 0) -> PreparedBatch:
        """Copy to the device, once for all layers, what they need of a batch.

        Args:
            batch: the rows.
            first: the first layer that they run through.
        """
        batch.check_plans(self.config)
        batch.check_states(self.config)
        positions = self._indices(batch.positions)
        if not self.config.has_rope:
            positions = torch.zeros_like(positions)
        slots = self.kv_cache.keys.shape[1]
        across = _names_other_layers(batch, slots)
        if across:
            local = partial(_across_layers, layer=first, slots=slots, heads=self.config.kv_heads)
            numbered = replace(
                batch, write_slots=local(batch.write_slots), kv_slots=local(batch.kv_slots)
            )
        else:
            numbered = batch
        return PreparedBatch(
            turns=(_at(self.tables[0], positions), _at(self.tables[1], positions)),
            write_slots=self._indices(numbered.write_slots),
            attention=prepare_metadata(numbered, self._windows, self.device),
            across_layers=across,
            planned=prepare_plans(batch, self.kv_cache.keys, self.kv_cache.values),
            observed_rows=self._indices(batch.observed_rows),
            states=tuple(
                StateRows(*ends, state)
                for ends, state in zip(
                    pairwise(batch.query_indptr.tolist()), batch.states.tolist(), strict=False
                )
            ),
        )

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the rows that the first layer takes, tokens' embeddings: [rows, row_width]."""
        tokens = self._indices(batch.token_ids)
        hidden = functional.embedding(tokens, self.weights.embed) * self.config.embedding_multiplier
        altup, weights = self.config.altup, self.weights.altup
        if altup is None or weights is None:
            return hidden
        return start_rows(altup, weights, self._stream_norms, tokens, hidden)

    def run_layers(
        self, batch: PreparedBatch, hidden: torch.Tensor, first: int, end: int
    ) -> torch.Tensor:
        """Run layers first <= i < end, which write K and V of the batch's rows.

        Args:
            batch: from ``prepare``.
            hidden: [rows, row_width]; not changed.
            first, end: the layers.

        Returns:
            New hidden rows [rows, row_width].
        """
        multiplier = self.config.residual_multiplier
        for index in range(first, end):
            layer = self.weights.layers[index]
            if layer.altup is not None:
                hidden = self._run_streams(index, layer, layer.altup, hidden, batch)
                continue
            attended = self._attention(index, layer, self._norm(hidden, layer.attn_norm), batch)
            attended = self._norm(attended, layer.attn_post_norm)
            hidden = hidden.add(attended, alpha=multiplier)
            normed = self._norm(hidden, layer.mlp_norm)
            if isinstance(layer.mlp, ExpertWeights):
                expanded = self.mix_experts(index, layer.mlp, normed)
            else:
                expanded = self.expand(layer.mlp, normed)
            expanded = self._norm(expanded, layer.mlp_post_norm)
            hidden = hidden.add(expanded, alpha=multiplier)
        return hidden

    def _run_streams(
        self,
        index: int,
        layer: LayerWeights,
        altup: AltUpLayerWeights,
        hidden: torch.Tensor,
        batch: PreparedBatch,
    ) -> torch.Tensor:
        """Run a layer of a model with streams of hidden rows; see ``models.altup.AltUp``."""
        mlp, cutoff = layer.mlp, self.config.gate_cutoff_of(index)
        assert isinstance(mlp, MlpWeights)
        return run_layer(
            altup, self._stream_norms, hidden, index,
            before=lambda rows: self._norm(rows, layer.attn_norm),
            attention=lambda rows: self._norm(
                self._attention(index, layer, rows, batch), layer.attn_post_norm
            ),
            mlp=lambda rows: self._norm(
                self.expand(mlp, self._norm(rows, layer.mlp_norm), cutoff), layer.mlp_post_norm
            ),
            activate=self._activate,
        )  # fmt: skip

    def compute_logits(self, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [outputs, vocab] float32 of the rows that want them."""
        rows = hidden[self._indices(batch.logit_rows)]
        if self.weights.altup is not None:
            rows = finish_rows(self.weights.altup, rows)
        logits = functional.linear(self._norm(rows, self.weights.final_norm), self.weights.head)
        logits, cap = logits.float() / self.config.logits_divisor, self.config.logits_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _attention(
        self, index: int, layer: LayerWeights, hidden: torch.Tensor, batch: PreparedBatch
    ) -> torch.Tensor:
        if isinstance(layer.qkv, StateSpaceWeights):
            return self._mix_states(index, layer.qkv, layer.o, hidden, batch)
        if isinstance(layer.qkv, DeltaRuleWeights):
            return self._apply_delta_rule(index, layer.qkv, layer.o, hidden, batch)
        if isinstance(layer.qkv, LatentWeights):
            return self._latent_attention(index, layer.qkv, layer.o, hidden, batch)
        config = self.config
        shares = config.shares_kv(index)
        heads = [config.query_heads, *([] if shares else [config.kv_heads] * 2)]
        qkv = _linear(hidden, layer.qkv).view(-1, sum(heads), config.head_dim)
        q, *own = torch.split(qkv, heads, dim=1)
        turns = batch.turns[config.is_local(index)]
        q = _rotate(self._norm_heads(q, layer.q_norm), turns)
        self.observed[index] = q[batch.observed_rows]
        if shares:
            attended = self._attend_written(index, q, batch).flatten(1)
        else:
            k, v = _rotate(self._norm_heads(own[0], layer.k_norm), turns), own[1]
            if config.value_norms:
                v = functional.rms_norm(v, v.shape[-1:], eps=config.norm_epsilon)
            attended = self.attend(index, q, k, v, batch).flatten(1)
        if layer.q_gate is not None:
            attended = attended * _linear(hidden, layer.q_gate).sigmoid()
        return _linear(attended, layer.o)

    def _latent_attention(
        self,
        index: int,
        weights: LatentWeights,
        output: Affine,
        hidden: torch.Tensor,
        batch: PreparedBatch,
    ) -> torch.Tensor:
        """Compute attention in its absorbed form; see ``models.config.LatentAttention``."""
        latent = self.config.latent
        assert latent is not None
        q = self._latent_queries(weights, hidden)
        plain, turning = torch.split(q, [latent.plain_dim, latent.rotary_dim], dim=-1)
        absorbed = torch.einsum("rhp,hpc->rhc", plain, weights.absorb)
        compressed = _linear(hidden, weights.key)[:, None]
        kept, shared = torch.split(compressed, [latent.rank, latent.rotary_dim], dim=-1)
        kept = self._norm(kept, weights.key_norm)
        turns = batch.turns[self.config.is_local(index)]
        q, k = in_key_order(absorbed, turning, turns), in_key_order(kept, shared, turns)
        self.observed[index] = q[batch.observed_rows]
        attended = latents_of(self.attend(index, q, k, k, batch), latent)
        values = torch.einsum("rhc,hvc->rhv", attended, weights.expand)
        return _linear(values.flatten(1), output)

    def _latent_queries(self, weights: LatentWeights, hidden: torch.Tensor) -> torch.Tensor:
        """Return queries before they are absorbed: [rows, query_heads, plain_dim + rotary_dim]."""
        latent = self.config.latent
        assert latent is not None
        source = hidden
        if weights.query_a is not None and weights.query_norm is not None:
            source = self._norm(_linear(hidden, weights.query_a), weights.query_norm)
        return _linear(source, weights.query).view(len(hidden), -1, latent.query_dim)

    def _mix_states(
        self,
        index: int,
        weights: StateSpaceWeights,
        output: Affine,
        hidden: torch.Tensor,
        batch: PreparedBatch,
    ) -> torch.Tensor:
        """Compute what a layer has instead of attention; see ``models.config.StateSpace``."""
        space = self.config.state_space
        assert isinstance(space, StateSpace)
        assert self.states is not None
        projected = _linear(hidden, weights.project)
        gated = mix_rows(space, weights, self.states, self._numbers[index], projected, batch.states)
        norm, epsilon = weights.norm.weight, self.config.norm_epsilon
        normed = functional.rms_norm(gated, norm.shape, norm.float(), epsilon)
        return _linear(normed.to(hidden.dtype), output)

    def _apply_delta_rule(
        self,
        index: int,
        weights: DeltaRuleWeights,
        output: Affine,
        hidden: torch.Tensor,
        batch: PreparedBatch,
    ) -> torch.Tensor:
        """Compute what a layer has instead of attention; see ``models.config.DeltaRule``."""
        rule = self.config.state_space
        assert isinstance(rule, DeltaRule)
        assert self.states is not None
        gated = apply_delta_rule(
            rule, weights, self.states, self._numbers[index], _linear(hidden, weights.project),
            batch.states, self.config.norm_epsilon,
        )  # fmt: skip
        return _linear(gated.to(hidden.dtype), output)

    def attend(
        self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PreparedBatch
    ) -> torch.Tensor:
        """Write K and V of a layer's rows to their slots, and let the rows attend to what they see.

        Args:
            index: the layer.
            q: [rows, query_heads, head_dim], rotated.
            k, v: [rows, kv_heads, head_dim]; k rotated.
            batch: from ``prepare``.

        Returns:
            [rows, query_heads, head_dim].
        """
        keys, values = self._shown(index, batch)
        keys[batch.write_slots] = k
        if v is not k:
            values[batch.write_slots] = v
        return self._attend_written(index, q, batch)

    def _shown(self, index: int, batch: PreparedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the K and V that a batch's slots name in a layer."""
        cache, number = self.kv_cache, self._numbers[index]
        if batch.across_layers:
            return cache.keys.flatten(0, 1), cache.values.flatten(0, 1)
        return cache.keys[number], cache.values[number]

    def _attend_written(self, index: int, q: torch.Tensor, batch: PreparedBatch) -> torch.Tensor:
        """Let a layer's rows attend to what they see of K and V that are written."""
        cache = self.kv_cache
        window, scale = self.config.window_of(index), self.config.score_scale
        sinks = self.weights.layers[index].sinks
        shown = self._shown(index, batch)
        attended = attend(q, *shown, batch.attention, window, scale, sinks)
        for request in batch.planned:
            attended[request.rows] = attend_planned(
                q, cache.keys, cache.values, request, index, window, scale, sinks
            )
        return attended

    def expand(
        self, mlp: MlpWeights, hidden: torch.Tensor, cutoff: float | None = None
    ) -> torch.Tensor:
        """Compute an MLP of rows [rows, hidden], where its weights are.

        Args:
            mlp: its weights.
            hidden: the rows.
            cutoff: see ``ModelConfig.gate_cutoffs``.
        """
        up = _linear(hidden, mlp.up)
        if not self.config.gated_mlp:
            return _linear(self._activate(up), mlp.down)
        gate, up = up.chunk(2, dim=-1)
        if self.config.activation == "swiglu_oai":
            limit = self.config.swiglu_limit
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
        if cutoff is not None:
            deviation, mean = torch.std_mean(gate, dim=-1, keepdim=True, correction=0)
            gate = functional.relu(gate - (mean + deviation * cutoff))
        return _linear(self._activate(gate) * up, mlp.down)

    def mix_experts(self, index: int, layer: ExpertWeights, hidden: torch.Tensor) -> torch.Tensor:
        """Send each row to the experts that the layer's router chooses; see ``Experts``."""
        experts = self.config.experts_of(index)
        assert experts is not None
        routing = route(experts, layer, hidden)
        if self.grouped_experts is not None and layer.stacked is not None:
            mixed = self.grouped_experts(
                hidden, routing.chosen, routing.weights, layer.stacked, self.config.activation,
                self.config.swiglu_limit,
            )  # fmt: skip
        else:
            mixed = self._mixed(index, layer, routing, hidden)
        if layer.shared is None:
            return mixed
        shared = self.expand(layer.shared, hidden)
        if layer.shared_router is not None:
            shared = functional.linear(hidden, layer.shared_router).sigmoid() * shared
        return mixed + shared

    def _mixed(
        self, index: int, layer: ExpertWeights, routing: Routing, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Compute a layer's experts one after the other."""
        if self.offloaded is None:
            outputs = self._computed(layer, routing, hidden)
        else:
            later = self._predicted(index, hidden, self.offloaded.lookahead)
            outputs = iter(self.offloaded.run(index, hidden, routing, later))
        mixed = torch.zeros_like(hidden)
        for output in outputs:
            weights = routing.weights[output.rows, output.ranks, None].to(hidden.dtype)
            mixed.index_add_(0, output.rows, output.expanded * weights)
        return mixed

    def _computed(
        self, layer: ExpertWeights, routing: Routing, hidden: torch.Tensor
    ) -> Iterator[ExpertOutput]:
        """Yield what each expert makes of its rows, all on the device."""
        flat = routing.chosen.flatten()
        counts = torch.bincount(flat, minlength=len(layer.experts)).tolist()
        pairs = torch.split(flat.argsort(stable=True), counts)
        for expert, own in zip(layer.experts, pairs, strict=True):
            if len(own):
                rows, ranks = own // routing.chosen.shape[1], own % routing.chosen.shape[1]
                yield ExpertOutput(rows, ranks, self.expand(expert, hidden[rows]))

    def _predicted(self, index: int, hidden: torch.Tensor, layers: int) -> dict[int, Routing]:
        """Return what the routers of the next layers would choose for a layer's rows.

        What layers add is small beside the rows, so it is mostly what they will choose.
        """
        predicted = {}
        for number in range(index + 1, min(index + 1 + layers, self.config.layers)):
            mlp, experts = self.weights.layers[number].mlp, self.config.experts_of(number)
            if experts is not None and isinstance(mlp, ExpertWeights):
                predicted[number] = route(experts, mlp, hidden)
        return predicted

    def _activate(self, values: torch.Tensor) -> torch.Tensor:
        match self.config.activation:
            case "silu":
                return functional.silu(values)
            case "gelu":
                return functional.gelu(values)
            case "gelu_tanh":
                return functional.gelu(values, approximate="tanh")
            case "swiglu_oai":
                return values * torch.sigmoid(_SWIGLU_OAI_ALPHA * values)

    def _norm_heads(self, heads: torch.Tensor, norm: Affine | None) -> torch.Tensor:
        """Norm [rows, heads, head_dim]: each head, or all of a row's together."""
        if not self.config.joint_qk_norm:
            return self._norm(heads, norm)
        return self._norm(heads.flatten(1), norm).view(heads.shape)

    def _norm(self, values: torch.Tensor, norm: Affine | None) -> torch.Tensor:
        """Norm the last dimension, in float32 whatever the dtype; None leaves all as it is."""
        if norm is None:
            return values
        size, epsilon = norm.weight.shape, self.config.norm_epsilon
        if self.config.norm == "layer":
            return functional.layer_norm(values, size, norm.weight, norm.bias, epsilon)
        return functional.rms_norm(values, size, norm.weight, epsilon)

    def _turns(self, table: tuple[Float32Array, Float32Array]) -> Turns:
        cos, sin = (torch.from_numpy(part).to(self.device) for part in table)
        return cos, sin

    def _indices(self, array: Int32Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, torch.int64, non_blocking=True)


def _names_other_layers(batch: ForwardBatch, slots: int) -> bool:
    """Whether a batch names cells of other layers than the one that it runs through."""
    named = batch.kv_slots
    return bool(len(named)) and bool(named.min() < 0 or named.max() >= slots)


def _across_layers(numbers: Int32Array, *, layer: int, slots: int, heads: int) -> Int32Array:
    """Return where named slots are in the whole cache, layer after layer; see ``ForwardBatch``."""
    away, slot = np.divmod(numbers, np.int32(heads * slots))
    return (layer + away) * np.int32(slots) + slot


def _linear(values: torch.Tensor, affine: Affine) -> torch.Tensor:
    return functional.linear(values, affine.weight, affine.bias)


def _at(table: Turns, positions: torch.Tensor) -> Turns:
    cos, sin = table
    return cos[positions][:, None], sin[positions][:, None]


def _rotate(heads: torch.Tensor, turns: Turns) -> torch.Tensor:
    """Apply the rotary embedding to [rows, heads, head_dim], in float32."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat(_rotated(first, second, turns), dim=-1).to(heads.dtype)


def _rotated(
    first: torch.Tensor, second: torch.Tensor, turns: Turns
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn pairs of numbers, float32."""
    cos, sin = turns
    return first * cos - second * sin, second * cos + first * sin


def in_key_order(latent: torch.Tensor, turning: torch.Tensor, turns: Turns) -> torch.Tensor:
    """Return latents [rows, heads, rank] and pairs of neighbours that turn as queries or keys."""
    pairs = turning.float()
    turned = _rotated(pairs[..., 0::2], pairs[..., 1::2], turns)
    halves = zip(latent.chunk(2, dim=-1), turned, strict=True)
    return torch.cat([part.to(latent.dtype) for half in halves for part in half], dim=-1)


def latents_of(keys: torch.Tensor, latent: LatentAttention) -> torch.Tensor:
    """Return the latents in keys [..., rank + rotary_dim], or in what is a sum of keys."""
    halves = [latent.rank // 2, latent.rotary_dim // 2] * 2
    first, _, second, _ = torch.split(keys, halves, dim=-1)
    return torch.cat((first, second), dim=-1)
