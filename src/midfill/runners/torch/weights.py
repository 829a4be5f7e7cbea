"""A checkpoint's weights as torch tensors on one device, fused where they are read together."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain

import torch

from midfill.models.altup import STREAMS
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.config import (
    DeltaRule,
    Experts,
    LatentAttention,
    StateLayers,
    StateSpace,
    tensor_shapes,
)


@dataclass(frozen=True)
class Affine:
    """The parameters of a linear layer or a norm.

    Attributes:
        weight: [out_features, in_features] of a linear layer, [features] of a norm.
        bias: [out_features] or [features], or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class MlpWeights:
    """One MLP.

    Attributes:
        up: rows of gate, if the MLP has one, then rows of up.
        down: back to the hidden size.
    """

    up: Affine
    down: Affine


@dataclass(frozen=True)
class LatentWeights:
    """The latent attention of one layer; see ``models.config.LatentAttention``.

    Attributes:
        query_a, query_norm: the queries' latent and its norm; None where they have none.
        query: of it, or of hidden rows: [query_heads * (plain_dim + rotary_dim), ...].
        key: the latent of keys and values, and the part of keys that is rotated.
        key_norm: of the latent.
        absorb: W_UK, [query_heads, plain_dim, rank].
        expand: W_UV, [query_heads, value_dim, rank].
    """

    query_a: Affine | None
    query_norm: Affine | None
    query: Affine
    key: Affine
    key_norm: Affine
    absorb: torch.Tensor
    expand: torch.Tensor


@dataclass(frozen=True)
class StateSpaceWeights:
    """What a layer has instead of attention; see ``models.config.StateSpace``. All but ``project``
    and ``norm`` are float32.

    Attributes:
        project: W_in: rows of z, x, B, C and dt.
        conv: [mixed, conv_width].
        conv_bias: [mixed]; None if there is none.
        dt_bias, decay, skip: [heads]; the two last are A and D.
        norm: of y * silu(z).
    """

    project: Affine
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    dt_bias: torch.Tensor
    decay: torch.Tensor
    skip: torch.Tensor
    norm: Affine


@dataclass(frozen=True)
class DeltaRuleWeights:
    """What a layer has instead of attention; see ``models.config.DeltaRule``. All but ``project``
    and ``norm`` are float32.

    Attributes:
        project: W_in: rows of z, of q, k and v, of b and of a.
        conv: [mixed, conv_width].
        dt_bias, decay: [heads]; the latter is A.
        norm: of each head's y.
    """

    project: Affine
    conv: torch.Tensor
    dt_bias: torch.Tensor
    decay: torch.Tensor
    norm: Affine


@dataclass(frozen=True)
class ExpertWeights:
    """The mixture of experts of one layer.

    Attributes:
        router: [experts, hidden], with a bias in some models.
        correction: float32 [experts], see ``Experts.corrected``; None where there is none.
        experts: one MLP each; in the machine's memory, if the device has no room for all.
        stacked: the same weights and biases with one more dimension, the first; None if they are
            in the machine's memory.
        shared_router: [1, hidden]; None where what tokens share has no gate.
        shared: what they share.
    """

    router: Affine
    correction: torch.Tensor | None
    experts: tuple[MlpWeights, ...]
    stacked: MlpWeights | None
    shared_router: torch.Tensor | None
    shared: MlpWeights | None


@dataclass(frozen=True)
class AltUpLayerWeights:
    """What one layer has for streams of hidden rows; see ``models.altup.AltUp``.

    Attributes:
        router_norm, router: of r: [hidden] and [STREAMS, hidden].
        predict, correct: W_P [STREAMS ** 2, STREAMS] and W_C [STREAMS, STREAMS].
        scale: [hidden].
        laurel_left, laurel_right, laurel_norm: of the learned residual.
        layer_gate, layer_out, layer_norm: of what is added of a token's own embeddings.
    """

    router_norm: Affine
    router: torch.Tensor
    predict: torch.Tensor
    correct: torch.Tensor
    scale: torch.Tensor
    laurel_left: torch.Tensor
    laurel_right: torch.Tensor
    laurel_norm: Affine
    layer_gate: Affine
    layer_out: torch.Tensor
    layer_norm: Affine


@dataclass(frozen=True)
class AltUpWeights:
    """What a model with streams has beside its layers.

    Attributes:
        layer_embed: tokens' embeddings for all layers, [layer_vocab, layers * layer_width].
        layer_project, layer_project_norm: W_e and its norm.
        spread, gather: [hidden, hidden] of each stream but the first, at the start and the end.
    """

    layer_embed: torch.Tensor
    layer_project: torch.Tensor
    layer_project_norm: Affine
    spread: tuple[torch.Tensor, ...]
    gather: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class LayerWeights:
    """One layer.

    Attributes:
        attn_norm, mlp_norm: before attention and before the MLP; None if the model has none.
        qkv: rows of q, k and v, one below the other, or of q alone in layers that share KV; or
            latent attention; or what a layer with a state has.
        q_gate: see ``ModelConfig.gated_attention``; None if the layer has none.
        q_norm, k_norm: of each head, or of all together; None if the model has none.
        attn_post_norm, mlp_post_norm: of what is added to the hidden rows; None if it has none.
        sinks: [query_heads], see ``ModelConfig.sinks``; None if the model has none.
        o: the output projection.
        mlp: an MLP, or a mixture of experts.
        altup: what it has for streams of hidden rows; None in other models.
    """

    attn_norm: Affine | None
    qkv: Affine | LatentWeights | StateSpaceWeights | DeltaRuleWeights
    q_gate: Affine | None
    q_norm: Affine | None
    k_norm: Affine | None
    attn_post_norm: Affine | None
    mlp_post_norm: Affine | None
    sinks: torch.Tensor | None
    o: Affine
    mlp_norm: Affine | None
    mlp: MlpWeights | ExpertWeights
    altup: AltUpLayerWeights | None = None


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a decoder; ``head`` is ``embed`` itself when the embeddings are tied.

    ``altup`` is None in models without streams of hidden rows.
    """

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Affine
    head: torch.Tensor
    altup: AltUpWeights | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all tensors; a tied embedding counts once."""
        storages = (tensor.untyped_storage() for tensor in _tensors(self))
        return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def load_weights(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    *,
    offload_experts: bool = False,
) -> DecoderWeights:
    """Dequantise a checkpoint's tensors one by one and copy them to the device.

    Args:
        checkpoint: the model.
        device, dtype: of the tensors.
        offload_experts: whether those of experts stay in the machine's memory.

    Raises:
        CheckpointError: a tensor can't be read.
    """
    return _Loader(checkpoint, device, dtype, offload_experts).load()


class _Loader:
    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        offload_experts: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._names = tensor_shapes(checkpoint.config).keys()
        self._device = device
        self._dtype = dtype
        self._offload_experts = offload_experts

    def load(self) -> DecoderWeights:
        config = self._checkpoint.config
        embed = self._tensor("embed.weight")
        return DecoderWeights(
            embed=embed,
            layers=tuple(self._layer(layer) for layer in range(config.layers)),
            final_norm=self._affine("final_norm"),
            head=embed if config.tied_embeddings else self._tensor("lm_head.weight"),
            altup=None if config.altup is None else self._streams(),
        )

    def _streams(self) -> AltUpWeights:
        def each(name: str) -> tuple[torch.Tensor, ...]:
            return tuple(self._tensor(f"{name}.{i}.weight") for i in range(STREAMS - 1))

        return AltUpWeights(
            layer_embed=self._tensor("layer_embed.weight"),
            layer_project=self._tensor("layer_project.weight"),
            layer_project_norm=self._affine("layer_project_norm"),
            spread=each("altup_proj"),
            gather=each("altup_unembed"),
        )

    def _altup(self, layer: str) -> AltUpLayerWeights:
        return AltUpLayerWeights(
            router_norm=self._affine(f"{layer}.altup_router_norm"),
            router=self._tensor(f"{layer}.altup_router.weight"),
            predict=self._tensor(f"{layer}.altup_predict.weight"),
            correct=self._tensor(f"{layer}.altup_correct.weight"),
            scale=self._tensor(f"{layer}.altup.correct_output_scale"),
            laurel_left=self._tensor(f"{layer}.laurel_left.weight"),
            laurel_right=self._tensor(f"{layer}.laurel_right.weight"),
            laurel_norm=self._affine(f"{layer}.laurel_norm"),
            layer_gate=self._affine(f"{layer}.layer_gate"),
            layer_out=self._tensor(f"{layer}.layer_out.weight"),
            layer_norm=self._affine(f"{layer}.layer_norm"),
        )

    def _layer(self, number: int) -> LayerWeights:
        config, layer = self._checkpoint.config, f"layers.{number}"
        experts, space = config.experts_of(number), config.state_space_of(number)
        attends = space is None
        norms_heads = attends and (config.qk_norm or config.joint_qk_norm)
        has_keys = not config.shares_kv(number)
        return LayerWeights(
            attn_norm=self._affine(f"{layer}.attn_norm") if config.pre_norms else None,
            qkv=self._attention(layer, has_keys) if space is None else self._states(layer, space),
            q_gate=self._affine(f"{layer}.q_gate") if config.gated_attention and attends else None,
            q_norm=self._affine(f"{layer}.q_norm") if norms_heads else None,
            k_norm=self._affine(f"{layer}.k_norm") if norms_heads and has_keys else None,
            attn_post_norm=self._affine(f"{layer}.attn_post_norm") if config.post_norms else None,
            mlp_post_norm=self._affine(f"{layer}.mlp_post_norm") if config.post_norms else None,
            sinks=self._tensor(f"{layer}.attn.sinks") if config.sinks else None,
            o=self._affine(f"{layer}.o" if attends else f"{layer}.ssm_out"),
            mlp_norm=self._affine(f"{layer}.mlp_norm") if config.pre_norms else None,
            mlp=self._mlp(layer) if experts is None else self._experts(layer, experts),
            altup=None if config.altup is None else self._altup(layer),
        )

    def _attention(self, layer: str, has_keys: bool) -> Affine | LatentWeights:
        latent = self._checkpoint.config.latent
        if latent is not None:
            return self._latent(layer, latent)
        if not has_keys:
            return self._affine(f"{layer}.q")
        return self._affine(f"{layer}.q", f"{layer}.k", f"{layer}.v")

    def _states(self, layer: str, space: StateLayers) -> StateSpaceWeights | DeltaRuleWeights:
        if isinstance(space, DeltaRule):
            return self._delta_rule(layer, space)
        assert isinstance(space, StateSpace)
        return self._state_space(layer, space)

    def _delta_rule(self, layer: str, rule: DeltaRule) -> DeltaRuleWeights:
        parts = (f"{layer}.ssm_{part}" for part in ("gate", "qkv", "beta", "alpha"))
        return DeltaRuleWeights(
            project=self._affine(*parts),
            conv=self._vector(f"{layer}.ssm_conv.weight"),
            dt_bias=self._vector(f"{layer}.ssm.dt_bias"),
            decay=self._decay(layer, rule.logarithmic),
            norm=self._affine(f"{layer}.ssm_norm"),
        )

    def _decay(self, layer: str, logarithmic: bool) -> torch.Tensor:
        """Return A of a layer with a state."""
        if logarithmic:
            return -torch.exp(self._vector(f"{layer}.ssm.A_log"))
        return self._vector(f"{layer}.ssm.A")

    def _state_space(self, layer: str, space: StateSpace) -> StateSpaceWeights:
        return StateSpaceWeights(
            project=self._affine(f"{layer}.ssm_in"),
            conv=self._vector(f"{layer}.ssm_conv.weight"),
            conv_bias=self._vector(f"{layer}.ssm_conv.bias") if space.conv_bias else None,
            dt_bias=self._vector(f"{layer}.ssm.dt_bias"),
            decay=self._decay(layer, space.logarithmic),
            skip=self._vector(f"{layer}.ssm.D"),
            norm=self._affine(f"{layer}.ssm_norm"),
        )

    def _latent(self, layer: str, latent: LatentAttention) -> LatentWeights:
        has_latent = latent.query_rank > 0
        if latent.stored_apart:
            keys = self._tensor(f"{layer}.k_b.weight").view(-1, latent.rank, latent.plain_dim)
            absorb = keys.transpose(1, 2)
            expand = self._tensor(f"{layer}.v_b.weight").view(-1, latent.value_dim, latent.rank)
        else:
            both = self._tensor(f"{layer}.kv_b.weight")
            both = both.view(-1, latent.plain_dim + latent.value_dim, latent.rank)
            absorb, expand = torch.split(both, [latent.plain_dim, latent.value_dim], dim=1)
        return LatentWeights(
            query_a=self._affine(f"{layer}.q_a") if has_latent else None,
            query_norm=self._affine(f"{layer}.q_a_norm") if has_latent else None,
            query=self._affine(f"{layer}.q_b" if has_latent else f"{layer}.q"),
            key=self._affine(f"{layer}.kv_a"),
            key_norm=self._affine(f"{layer}.kv_a_norm"),
            absorb=absorb.contiguous(),
            expand=expand.contiguous(),
        )

    def _mlp(self, prefix: str, device: torch.device | None = None) -> MlpWeights:
        gate = (f"{prefix}.gate",) if self._checkpoint.config.gated_mlp else ()
        return MlpWeights(
            up=self._affine(*gate, f"{prefix}.up", device=device),
            down=self._affine(f"{prefix}.down", device=device),
        )

    def _experts(self, layer: str, experts: Experts) -> ExpertWeights:
        shared = experts.shared_ffn > 0
        gated = shared and experts.shared_gated
        correction = f"{layer}.router.e_score_correction_bias"
        each = (self._expert(f"{layer}.experts.{i}") for i in range(experts.count))
        stacked = None if self._offload_experts else _stack_experts(each, experts.count)
        return ExpertWeights(
            router=self._affine(f"{layer}.router"),
            correction=self._tensor(correction).float() if experts.corrected else None,
            experts=tuple(each) if stacked is None else _apart(stacked),
            stacked=stacked,
            shared_router=self._tensor(f"{layer}.shared_router.weight") if gated else None,
            shared=self._mlp(f"{layer}.shared") if shared else None,
        )

    def _expert(self, prefix: str) -> MlpWeights:
        if not self._offload_experts:
            return self._mlp(prefix)
        host = torch.device("cpu")
        mlp = self._mlp(prefix, host)
        if self._device.type != "cuda":
            return mlp
        # A GPU copies from memory that the system can't move, beside what it computes.
        return MlpWeights(_pinned(mlp.up), _pinned(mlp.down))

    def _affine(self, *modules: str, device: torch.device | None = None) -> Affine:
        """Return the modules' weights and biases, stacked by rows."""

        def stacked(kind: str) -> torch.Tensor:
            return _stack([self._tensor(f"{module}.{kind}", device) for module in modules])

        has_bias = f"{modules[0]}.bias" in self._names
        return Affine(stacked("weight"), stacked("bias") if has_bias else None)

    def _vector(self, name: str) -> torch.Tensor:
        """Return what stays in float32."""
        return torch.tensor(self._checkpoint.tensor(name).to_float32()).to(self._device)

    def _tensor(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        # The array may be a read-only map of the file, so the data is copied.
        tensor = torch.tensor(self._checkpoint.tensor(name).to_float32())
        return tensor.to(device or self._device, self._dtype).contiguous()


def _pinned(affine: Affine) -> Affine:
    bias = None if affine.bias is None else affine.bias.pin_memory()
    return Affine(affine.weight.pin_memory(), bias)


def _stack_experts(experts: Iterator[MlpWeights], count: int) -> MlpWeights:
    """Join experts' tensors one by one: both forms of all of them never take memory at once."""
    first = next(experts)
    joined = [tensor.new_empty((count, *tensor.shape)) for tensor in _tensors(first)]
    for number, expert in enumerate(chain([first], experts)):
        for whole, tensor in zip(joined, _tensors(expert), strict=True):
            whole[number] = tensor
    return _like(first, joined)


def _apart(stacked: MlpWeights) -> tuple[MlpWeights, ...]:
    """Return each expert's part of stacked weights."""
    return tuple(_like(stacked, list(parts)) for parts in zip(*_tensors(stacked), strict=True))


def _like(mlp: MlpWeights, tensors: list[torch.Tensor]) -> MlpWeights:
    """Return weights with other tensors in the places of those that an MLP has."""
    left = iter(tensors)

    def replaced(affine: Affine) -> Affine:
        return Affine(next(left), None if affine.bias is None else next(left))

    return MlpWeights(replaced(mlp.up), replaced(mlp.down))


def _stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _tensors(part: object) -> Iterator[torch.Tensor]:
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from _tensors(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors(getattr(part, field.name))
