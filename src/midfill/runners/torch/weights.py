"""A checkpoint's weights as torch tensors on one device, fused where they are read together."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch

from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.config import Experts, tensor_shapes


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
class ExpertWeights:
    """The mixture of experts of one layer.

    Attributes:
        router: [experts, hidden].
        experts: one MLP each.
        shared_router: [1, hidden]; None where tokens share no expert.
        shared: what they share.
    """

    router: torch.Tensor
    experts: tuple[MlpWeights, ...]
    shared_router: torch.Tensor | None
    shared: MlpWeights | None


@dataclass(frozen=True)
class LayerWeights:
    """One layer.

    Attributes:
        attn_norm, mlp_norm: before attention and before the MLP.
        qkv: rows of q, k and v, one below the other.
        q_norm, k_norm: of each head; None if the model has none.
        attn_post_norm, mlp_post_norm: of what is added to the hidden rows; None if it has none.
        o: attention's output projection.
        mlp: an MLP, or a mixture of experts.
    """

    attn_norm: Affine
    qkv: Affine
    q_norm: Affine | None
    k_norm: Affine | None
    attn_post_norm: Affine | None
    mlp_post_norm: Affine | None
    o: Affine
    mlp_norm: Affine
    mlp: MlpWeights | ExpertWeights


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a decoder; ``head`` is ``embed`` itself when the embeddings are tied."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Affine
    head: torch.Tensor

    @property
    def bytes(self) -> int:
        """Bytes of all tensors; a tied embedding counts once."""
        storages = {tensor.data_ptr(): tensor.nbytes for tensor in _tensors(self)}
        return sum(storages.values())


def load_weights(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> DecoderWeights:
    """Dequantise a checkpoint's tensors one by one and copy them to the device.

    Raises:
        CheckpointError: a tensor can't be read.
    """
    return _Loader(checkpoint, device, dtype).load()


class _Loader:
    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._names = tensor_shapes(checkpoint.config).keys()
        self._device = device
        self._dtype = dtype

    def load(self) -> DecoderWeights:
        config = self._checkpoint.config
        embed = self._tensor("embed.weight")
        return DecoderWeights(
            embed=embed,
            layers=tuple(self._layer(layer) for layer in range(config.layers)),
            final_norm=self._affine("final_norm"),
            head=embed if config.tied_embeddings else self._tensor("lm_head.weight"),
        )

    def _layer(self, number: int) -> LayerWeights:
        config, layer = self._checkpoint.config, f"layers.{number}"
        experts = config.experts_of(number)
        return LayerWeights(
            attn_norm=self._affine(f"{layer}.attn_norm"),
            qkv=self._affine(f"{layer}.q", f"{layer}.k", f"{layer}.v"),
            q_norm=self._affine(f"{layer}.q_norm") if config.qk_norm else None,
            k_norm=self._affine(f"{layer}.k_norm") if config.qk_norm else None,
            attn_post_norm=self._affine(f"{layer}.attn_post_norm") if config.post_norms else None,
            mlp_post_norm=self._affine(f"{layer}.mlp_post_norm") if config.post_norms else None,
            o=self._affine(f"{layer}.o"),
            mlp_norm=self._affine(f"{layer}.mlp_norm"),
            mlp=self._mlp(layer) if experts is None else self._experts(layer, experts),
        )

    def _mlp(self, prefix: str) -> MlpWeights:
        gate = (f"{prefix}.gate",) if self._checkpoint.config.gated_mlp else ()
        return MlpWeights(self._affine(*gate, f"{prefix}.up"), self._affine(f"{prefix}.down"))

    def _experts(self, layer: str, experts: Experts) -> ExpertWeights:
        shared = experts.shared_ffn > 0
        return ExpertWeights(
            router=self._tensor(f"{layer}.router.weight"),
            experts=tuple(self._mlp(f"{layer}.experts.{i}") for i in range(experts.count)),
            shared_router=self._tensor(f"{layer}.shared_router.weight") if shared else None,
            shared=self._mlp(f"{layer}.shared") if shared else None,
        )

    def _affine(self, *modules: str) -> Affine:
        """Return the modules' weights and biases, stacked by rows."""
        weight = _stack([self._tensor(f"{module}.weight") for module in modules])
        if f"{modules[0]}.bias" not in self._names:
            return Affine(weight)
        return Affine(weight, _stack([self._tensor(f"{module}.bias") for module in modules]))

    def _tensor(self, name: str) -> torch.Tensor:
        # The array may be a read-only map of the file, so the data is copied.
        tensor = torch.tensor(self._checkpoint.tensor(name).to_float32())
        return tensor.to(self._device, self._dtype)


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
