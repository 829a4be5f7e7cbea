"""ModelConfig: the shape of a decoder-only transformer, for every family midfill serves.

Names and shapes of a model's tensors follow from it.
"""

from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "gelu"]
NormKind = Literal["rms", "layer"]
RopeScalingKind = Literal["none", "linear", "dynamic", "yarn", "llama3", "factors"]


@dataclass(frozen=True)
class RopeScaling:
    """Rotary position scaling; field names follow transformers' ``rope_scaling``.

    Attributes:
        kind: the rule.
        factor: ratio of the extended context to the original one.
        original_context: positions the model was trained on (for yarn, llama3, dynamic).
        low_freq_factor, high_freq_factor: for llama3.
        beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, truncate: for yarn; None is
            the rule's default.
        frequency_factors: for factors: divisors of the head_dim / 2 frequencies (GGUF files state
            llama3 scaling this way).
    """

    kind: RopeScalingKind = "none"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class Experts:
    """The MLP of a mixture of experts: a router chooses a few of them for each token.

    The probabilities of all experts are the softmax of the router's outputs. The outputs of those
    chosen are added up, each times its probability.

    Attributes:
        count: how many there are.
        per_token: how many of them a token is sent to.
        ffn: inner size of each one.
        normalised: whether the probabilities of those chosen are scaled to a sum of 1.
        shared_ffn: inner size of a further expert, which all tokens are sent to, times the sigmoid
            of a number of its own; 0 where there is none.
        dense_layers: layers with one MLP of ``ModelConfig.ffn`` instead.
    """

    count: int
    per_token: int
    ffn: int
    normalised: bool
    shared_ffn: int = 0
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """A pre-norm decoder with grouped-query attention and rotary positions.

    Attributes:
        family: "llama", "qwen2", "qwen3", "starcoder2", "mistral", "granite", "gemma", ...
        layers, hidden, query_heads, kv_heads, head_dim, ffn, vocab: sizes. The rotary embedding
            covers the whole head_dim, its two halves rotated against each other (NEOX order).
        context: maximum sequence length in tokens.
        norm, norm_epsilon: RMSNorm, or LayerNorm (with bias).
        activation: activation of the MLP.
        gated_mlp: whether the MLP is down(act(gate) * up) instead of down(act(up)).
        qkv_bias, output_bias, mlp_bias: which projections carry a bias.
        qk_norm: RMSNorm of each query and key head before the rotary embedding (Qwen3).
        post_norms: further norms of what attention and the MLP add to the hidden rows (Gemma 3).
        tied_embeddings: whether the LM head is the embedding.
        rope_theta, rope_scaling: base and scaling of the rotary embedding.
        local_rope_theta: base in windowed layers, which have no scaling then; None is as elsewhere.
        sliding_window: number of keys a query sees in windowed layers, itself included; None for
            all.
        windowed_layers: the layers that use the window; None for every layer if there is a window.
        embedding_multiplier, residual_multiplier, logits_divisor: Granite's scalars.
        attention_scale: factor of q.k; None for head_dim ** -0.5.
        experts: the mixtures of experts that stand in the place of MLPs; None for dense models.
        eos_token_ids, bos_token_id: as stated by the checkpoint.
    """

    family: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    norm: NormKind = "rms"
    norm_epsilon: float = 1e-5
    activation: Activation = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    tied_embeddings: bool = False
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    local_rope_theta: float | None = None
    sliding_window: int | None = None
    windowed_layers: tuple[int, ...] | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    attention_scale: float | None = None
    experts: Experts | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def score_scale(self) -> float:
        """The factor of q.k before the softmax."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of one layer, None where it sees everything."""
        if self.windowed_layers is not None and layer not in self.windowed_layers:
            return None
        return self.sliding_window

    def experts_of(self, layer: int) -> Experts | None:
        """Return the mixture of experts of one layer, None where it has a single MLP."""
        if self.experts is None or layer in self.experts.dense_layers:
            return None
        return self.experts

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers with a mixture of experts."""
        return tuple(i for i in range(self.layers) if self.experts_of(i) is not None)

    def is_local(self, layer: int) -> bool:
        """Return whether a layer's rotary embedding has the base of windowed layers."""
        return self.local_rope_theta is not None and self.window_of(layer) is not None


Shape = tuple[int, ...]


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return canonical name -> shape of every tensor of a model with this configuration.

    The names are explained in ``midfill.models.checkpoints.checkpoint``. A tied LM head is not
    listed.
    """
    shapes: dict[str, Shape] = {"embed.weight": (config.vocab, config.hidden)}
    for layer in range(config.layers):
        for name, shape in _layer_shapes(config, layer).items():
            shapes[f"layers.{layer}.{name}"] = shape
    shapes.update(_norm_shapes(config, "final_norm"))
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab, config.hidden)
    return shapes


def _layer_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    query = config.query_heads * config.head_dim
    key = config.kv_heads * config.head_dim
    shapes = {
        **_norm_shapes(config, "attn_norm"),
        **_linear_shapes("q", query, config.hidden, config.qkv_bias),
        **_linear_shapes("k", key, config.hidden, config.qkv_bias),
        **_linear_shapes("v", key, config.hidden, config.qkv_bias),
        **_linear_shapes("o", config.hidden, query, config.output_bias),
        **_norm_shapes(config, "mlp_norm"),
    }
    experts = config.experts_of(layer)
    if experts is None:
        shapes.update(_mlp_shapes(config, "", config.ffn))
    else:
        shapes.update(_expert_shapes(config, experts))
    if config.post_norms:
        shapes.update(_norm_shapes(config, "attn_post_norm"))
        shapes.update(_norm_shapes(config, "mlp_post_norm"))
    if config.qk_norm:
        shapes["q_norm.weight"] = shapes["k_norm.weight"] = (config.head_dim,)
    return shapes


def _mlp_shapes(config: ModelConfig, prefix: str, ffn: int) -> dict[str, Shape]:
    shapes = {
        **_linear_shapes(f"{prefix}up", ffn, config.hidden, config.mlp_bias),
        **_linear_shapes(f"{prefix}down", config.hidden, ffn, config.mlp_bias),
    }
    if config.gated_mlp:
        shapes.update(_linear_shapes(f"{prefix}gate", ffn, config.hidden, config.mlp_bias))
    return shapes


def _expert_shapes(config: ModelConfig, experts: Experts) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"router.weight": (experts.count, config.hidden)}
    for expert in range(experts.count):
        shapes.update(_mlp_shapes(config, f"experts.{expert}.", experts.ffn))
    if experts.shared_ffn:
        shapes["shared_router.weight"] = (1, config.hidden)
        shapes.update(_mlp_shapes(config, "shared.", experts.shared_ffn))
    return shapes


def _linear_shapes(name: str, outputs: int, inputs: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    return weight | {f"{name}.bias": (outputs,)} if bias else weight


def _norm_shapes(config: ModelConfig, name: str) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (config.hidden,)}
    return weight | {f"{name}.bias": (config.hidden,)} if config.norm == "layer" else weight
