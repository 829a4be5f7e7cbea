"""FusedLayers: a decoder's forward pass with Triton kernels between its matrix products.

Reads all that changes from step to step in ``StepInputs``, so a CUDA graph can capture it.
"""

import torch
from torch.nn import functional

from midfill.models.config import ModelConfig
from midfill.runners.torch.decoder import Decoder
from midfill.runners.torch.kernels.attention import attend_rows
from midfill.runners.torch.kernels.hidden_rows import GATES, add_norm, gate
from midfill.runners.torch.kernels.rotary import rotate_and_store
from midfill.runners.torch.kernels.step_inputs import StepInputs
from midfill.runners.torch.weights import Affine, ExpertWeights, LayerWeights, MlpWeights

_WIDEST_HEAD = 256


def is_fusible(config: ModelConfig) -> bool:
    """Return whether the kernels know all that a model's layers have."""
    return (
        config.latent is None
        and config.state_space is None
        and config.altup is None
        and config.has_rope
        and config.pre_norms
        and not config.joint_qk_norm
        and not config.gated_attention
        and config.head_dim <= _WIDEST_HEAD
    )


class FusedLayers:
    """Runs all layers of a decoder.

    Args:
        decoder: its weights and KV cache; its model ``is_fusible``, and experts are computed at
            once.
        processors: of the GPU.
    """

    def __init__(self, decoder: Decoder, processors: int) -> None:
        self._decoder = decoder
        self._config = decoder.config
        self._processors = processors

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Run a step's rows; returns them normed for the LM head: [rows, hidden]."""
        config, weights = self._config, self._decoder.weights
        hidden = functional.embedding(inputs.token_ids, weights.embed)
        if config.embedding_multiplier != 1.0:
            hidden = hidden * config.embedding_multiplier
        following = [layer.attn_norm for layer in weights.layers[1:]] + [weights.final_norm]
        hidden, normed = self._add_norm(hidden, None, weights.layers[0].attn_norm)
        for index, (layer, next_norm) in enumerate(zip(weights.layers, following, strict=True)):
            attended = self._attention(index, layer, normed, inputs)
            if layer.attn_post_norm is not None:
                attended = self._add_norm(attended, None, layer.attn_post_norm)[1]
            hidden, normed = self._add_norm(hidden, attended, layer.mlp_norm)
            expanded = self._mlp(index, layer.mlp, normed)
            if layer.mlp_post_norm is not None:
                expanded = self._add_norm(expanded, None, layer.mlp_post_norm)[1]
            hidden, normed = self._add_norm(hidden, expanded, next_norm)
        return normed

    def _attention(
        self, index: int, layer: LayerWeights, normed: torch.Tensor, inputs: StepInputs
    ) -> torch.Tensor:
        config, decoder = self._config, self._decoder
        assert isinstance(layer.qkv, Affine)
        keys, values = decoder.kv_cache.keys[index], decoder.kv_cache.values[index]
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = layer.q_norm.weight, layer.k_norm.weight
        queries = rotate_and_store(
            functional.linear(normed, layer.qkv.weight, layer.qkv.bias),
            keys, values, inputs, decoder.tables[config.is_local(index)], config.query_heads,
            norms, config.norm_epsilon,
        )  # fmt: skip
        attended = attend_rows(
            queries, keys, values, inputs, config.window_of(index), config.score_scale,
            self._processors, layer.sinks,
        )  # fmt: skip
        return functional.linear(attended.flatten(1), layer.o.weight, layer.o.bias)

    def _mlp(
        self, index: int, mlp: MlpWeights | ExpertWeights, normed: torch.Tensor
    ) -> torch.Tensor:
        if isinstance(mlp, ExpertWeights):
            return self._decoder.mix_experts(index, mlp, normed)
        activation = self._config.activation
        if not self._config.gated_mlp or activation not in GATES:
            return self._decoder.expand(mlp, normed)
        gated = gate(functional.linear(normed, mlp.up.weight, mlp.up.bias), activation)
        return functional.linear(gated, mlp.down.weight, mlp.down.bias)

    def _add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Affine | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config = self._config
        assert norm is not None
        return add_norm(
            hidden, delta, config.residual_multiplier, norm.weight, norm.bias,
            config.norm_epsilon, centred=config.norm == "layer",
        )  # fmt: skip
