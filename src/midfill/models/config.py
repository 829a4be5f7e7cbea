"""ModelConfig: the shape of a decoder-only transformer, for every family midfill serves.

Names and shapes of a model's tensors follow from it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal

from midfill.models.altup import STREAMS, AltUp

Activation = Literal["silu", "gelu_tanh", "gelu", "swiglu_oai"]
NormKind = Literal["rms", "layer"]
RopeScalingKind = Literal["none", "linear", "dynamic", "yarn", "llama3", "factors"]
ExpertScoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class RopeScaling:
    """Rotary position scaling; field names follow transformers' ``rope_scaling``.

    Attributes:
        kind: the rule.
        attention_factor: of queries and keys, for yarn and factors; None is the rule's default.
        factor: ratio of the extended context to the original one.
        original_context: positions the model was trained on (for yarn, llama3, dynamic).
        low_freq_factor, high_freq_factor: for llama3.
        beta_fast, beta_slow, mscale, mscale_all_dim, truncate: for yarn; None is the rule's
            default.
        frequency_factors: for factors: divisors of the rotary_dim / 2 frequencies (GGUF files state
            llama3 scaling this way; LongRoPE).
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

    The probabilities of all experts are the softmax of the router's outputs, or the sigmoid of
    each. The outputs of those chosen are added up, each times its probability.

    Attributes:
        count: how many there are.
        per_token: how many of them a token is sent to.
        ffn: inner size of each one.
        normalised: whether the probabilities of those chosen are scaled to a sum of 1.
        shared_ffn: inner size of a further expert, which all tokens are sent to; 0 where there is
            none.
        shared_gated: whether its outputs are multiplied by the sigmoid of a number of its own.
        dense_layers: layers with one MLP of ``ModelConfig.ffn`` instead.
        scoring: how a router's outputs become probabilities.
        corrected: whether experts are chosen by their probabilities plus a number of each expert's
            own, which balances their loads (DeepSeek-V3); those of a sum aren't changed by it.
        groups: in how many groups of consecutive experts they are divided.
        groups_per_token: from how many groups a token's experts are chosen: of those with the
            likeliest expert, or, with ``corrected``, the two likeliest together.
        weight_factor: of the probabilities, after they have been normalised.
        router_bias: whether the router has a bias.
    """

    count: int
    per_token: int
    ffn: int
    normalised: bool
    shared_ffn: int = 0
    shared_gated: bool = True
    dense_layers: tuple[int, ...] = ()
    scoring: ExpertScoring = "softmax"
    corrected: bool = False
    groups: int = 1
    groups_per_token: int = 1
    weight_factor: float = 1.0
    router_bias: bool = False


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2024, arXiv 2405.04434, section 2.1).

    What is kept of a token is a latent vector c, from which each head's key and value are a
    product: k = [W_UK c, rotated part that all heads share], v = W_UV c. Runners keep to the
    *absorbed* form: q . W_UK c = (W_UK^T q) . c, and the sum of p_i W_UV c_i is W_UV of the sum of
    p_i c_i. So attention itself is that of a model with one KV head, whose key is the latent and
    the rotated part, and whose value is that same key; ``ModelConfig.kv_heads`` is 1, and
    ``head_dim`` the size of the key. Of the sum of values, the latent part is used.

    A key's numbers are in an order in which the rotary embedding turns its halves against each
    other, like every model's: [first half of the latent, first numbers of the rotated pairs, second
    half of the latent, second numbers of the pairs]; pairs of the latent don't turn.

    Attributes:
        query_rank: size of the latent that queries are computed from; 0 where they are computed
            from hidden rows.
        rank: size of c.
        plain_dim: of a head's query and key, numbers that aren't rotated.
        rotary_dim: numbers that are, in pairs of neighbours.
        value_dim: of a head's value.
        stored_apart: whether the checkpoint has W_UK, transposed, and W_UV as matrices of their own
            instead of one, as new GGUF files do.
    """

    query_rank: int
    rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    stored_apart: bool = False

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query before it is absorbed."""
        return self.plain_dim + self.rotary_dim

    @property
    def key_dim(self) -> int:
        """Numbers that are kept of a token."""
        return self.rank + self.rotary_dim


@dataclass(frozen=True)
class StateLayers(ABC):
    """What some layers have instead of attention: a state of one size, however long a text is.

    Such a layer keeps no KV. Of each head it has a matrix S, and of a short causal convolution its
    last inputs.

    Attributes:
        layers: those that have it, ascending; the others have attention.
        heads, head_dim: of what a layer puts out.
        state_dim: S has head_dim * state_dim numbers.
        conv_width: inputs that an output of the convolution depends on, its own row's included.
        logarithmic: whether the checkpoint has log(-A), as Hugging Face's do, or A, as GGUF files:
            a number below 0 of each head, by which its state decays.
    """

    layers: tuple[int, ...]
    heads: int
    head_dim: int
    state_dim: int
    conv_width: int
    logarithmic: bool = True

    @property
    @abstractmethod
    def mixed(self) -> int:
        """Numbers of a row that go through the convolution."""

    @property
    @abstractmethod
    def projected(self) -> int:
        """Numbers that are computed of a hidden row."""

    @property
    def inner(self) -> int:
        """Numbers that all heads put out."""
        return self.heads * self.head_dim

    @property
    def layer_floats(self) -> int:
        """Numbers of one layer's state."""
        return (self.conv_width - 1) * self.mixed + self.inner * self.state_dim

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state, all layers together; it is kept in float32."""
        return 4 * len(self.layers) * self.layer_floats


@dataclass(frozen=True)
class StateSpace(StateLayers):
    """Mamba-2 in the place of some layers' attention.

    Source: Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through
    Structured State Space Duality", 2024, arXiv 2405.21060, section 7.

    Of a row, W_in gives z, [x, B, C] and dt. After the convolution and SiLU of [x, B, C], each head
    computes, with dt = softplus(dt + dt_bias) and a number A below 0 of its own,

        S = exp(dt A) S + dt x B^T,    y = S C + D x,

    and the layer's output is W_out norm(y * silu(z)).

    Attributes:
        layers, conv_width, logarithmic: see ``StateLayers``.
        heads, head_dim: of x, y and z.
        state_dim: numbers of B and of C, which all heads share.
        conv_bias: whether the convolution has a bias.
    """

    conv_bias: bool = True

    @property
    def mixed(self) -> int:
        """Numbers of x, B and C."""
        return self.inner + 2 * self.state_dim

    @property
    def projected(self) -> int:
        """Numbers of z, x, B, C and dt."""
        return self.inner + self.mixed + self.heads


@dataclass(frozen=True)
class DeltaRule(StateLayers):
    """The gated delta rule in the place of some layers' attention (Gated DeltaNet).

    Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule",
    2024, arXiv 2412.06464, section 3.1.

    Of a row, W_in gives z, [q, k, v], b and a. After the convolution and SiLU of [q, k, v], q and k
    of each head are scaled to length 1, and q by state_dim ** -0.5 besides. With beta = sigmoid(b),
    alpha = exp(A softplus(a + dt_bias)) and a number A below 0 of its own, each head computes

        S = alpha S,    S = S + beta (v - S k) k^T,    y = S q:

    what S recalls for the key k is replaced by v, for a part of beta. The layer's output is
    W_out (norm(y) * silu(z)), each head normed by itself.

    Attributes:
        layers, conv_width, logarithmic: see ``StateLayers``.
        heads, head_dim: of v, y and z.
        state_dim: of a head of q or k.
        key_heads: of q and of k; each serves heads / key_heads heads of v.
        tiled: whether head i of v has the key of head i % key_heads, as in GGUF files of Qwen3.5,
            or of head i // (heads / key_heads).
    """

    key_heads: int = 1
    tiled: bool = False

    @property
    def mixed(self) -> int:
        """Numbers of q, k and v."""
        return self.inner + 2 * self.key_heads * self.state_dim

    @property
    def projected(self) -> int:
        """Numbers of z, q, k, v, b and a."""
        return self.inner + self.mixed + 2 * self.heads


@dataclass(frozen=True)
class ModelConfig:
    """A decoder with grouped-query attention and rotary positions.

    Attributes:
        family: "llama", "qwen2", "qwen3", "starcoder2", "mistral", "granite", "gemma", ...
        layers, hidden, query_heads, kv_heads, head_dim, ffn, vocab: sizes. The rotary embedding
            covers the whole head_dim, its two halves rotated against each other (NEOX order).
        context: maximum sequence length in tokens.
        norm, norm_epsilon: RMSNorm, or LayerNorm (with bias).
        activation: activation of the MLP. "swiglu_oai" is gpt-oss's gate, with both halves clamped:
            (up + 1) * gate * sigmoid(1.702 * gate).
        swiglu_limit: up to which swiglu_oai's halves are clamped; gate has no lower limit.
        gated_mlp: whether the MLP is down(act(gate) * up) instead of down(act(up)).
        qkv_bias, output_bias, mlp_bias: which projections carry a bias; MLPs are experts', too.
        qk_norm: RMSNorm of each query and key head before the rotary embedding (Qwen3).
        joint_qk_norm: instead, one RMSNorm of all of a row's query heads, and one of all its key
            heads (OLMo 2).
        pre_norms: norms of what attention and the MLP read; without, they read the hidden rows.
        post_norms: norms of what attention and the MLP add to the hidden rows (Gemma 3, OLMo 2).
        tied_embeddings: whether the LM head is the embedding.
        rotated: numbers of a head that the rotary embedding turns; None for all. The others come
            first in each half, and their pairs don't turn.
        has_rope: whether queries and keys are rotated at all. Where they are not, attention knows
            positions by what its layers see alone.
        rope_theta, rope_scaling: base and scaling of the rotary embedding.
        local_rope_theta: base in windowed layers, which have no scaling then; None is as elsewhere.
        sliding_window: number of keys a query sees in windowed layers, itself included; None for
            all.
        windowed_layers: the layers that use the window; None for every layer if there is a window.
        embedding_multiplier, residual_multiplier, logits_divisor: Granite's scalars.
        attention_scale: factor of q.k; None for head_dim ** -0.5.
        gated_attention: whether what attention puts out is multiplied by the sigmoid of as many
            numbers, computed from hidden rows beside the queries (Qwen3-Next).
        sinks: whether each query head has a learned score that joins the softmax without a value.
        experts: the mixtures of experts that stand in the place of MLPs; None for dense models.
        latent: multi-head latent attention in the place of grouped-query attention; None for other
            models.
        state_space: what some layers have instead of attention; None for other models.
        kv_sharing_layers: how many of the last layers compute queries alone. They attend to K and V
            of the last layer before them that sees as much as they do, and keep none.
        value_norms: RMSNorm, without weights, of each value head.
        gate_cutoffs: for each layer, by how many standard deviations above the mean of all gates of
            its MLP a gate must be to count; what it has above that is activated. None where all
            count; empty if that is so for all layers. (Statistical top-k, You et al. 2025, arXiv
            2506.06644.)
        logits_cap: logits are cap * tanh(logits / cap); None leaves them as they are.
        altup: hidden rows of several streams; None for other models.
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
    joint_qk_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    tied_embeddings: bool = False
    rotated: int | None = None
    has_rope: bool = True
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    local_rope_theta: float | None = None
    sliding_window: int | None = None
    windowed_layers: tuple[int, ...] | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    attention_scale: float | None = None
    gated_attention: bool = False
    sinks: bool = False
    swiglu_limit: float = 7.0
    experts: Experts | None = None
    latent: LatentAttention | None = None
    state_space: StateLayers | None = None
    kv_sharing_layers: int = 0
    value_norms: bool = False
    gate_cutoffs: tuple[float | None, ...] = ()
    logits_cap: float | None = None
    altup: AltUp | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def score_scale(self) -> float:
        """The factor of q.k before the softmax."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def q_norm_size(self) -> int:
        """Numbers that are normed together: of one query head, or of all."""
        return self.head_dim * (self.query_heads if self.joint_qk_norm else 1)

    @property
    def k_norm_size(self) -> int:
        """Numbers that are normed together: of one key head, or of all."""
        return self.head_dim * (self.kv_heads if self.joint_qk_norm else 1)

    @property
    def rotary_dim(self) -> int:
        """Numbers of a query or key that the rotary embedding turns."""
        if self.latent is not None:
            return self.latent.rotary_dim
        return self.head_dim if self.rotated is None else self.rotated

    @property
    def vectors_per_cell(self) -> int:
        """Vectors of ``head_dim`` numbers kept per token, layer and KV head: K and V.

        One, where a value is the key itself.
        """
        return 2 if self.latent is None else 1

    def heads_of(self, name: str) -> int:
        """Return how many heads' rows a tensor of queries or keys has; 0 for other tensors.

        Norms of heads have those of one.
        """
        module = name.split(".")[-2:-1]
        heads = {"q": self.query_heads, "k": self.kv_heads, "q_norm": 1, "k_norm": 1}
        return heads.get(module[0] if module else "", 0)

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

    def state_space_of(self, layer: int) -> StateLayers | None:
        """Return what a layer has instead of attention, None where it has attention."""
        if self.state_space is None or layer not in self.state_space.layers:
            return None
        return self.state_space

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention, ascending."""
        return tuple(i for i in range(self.layers) if self.state_space_of(i) is None)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that keep KV, ascending."""
        return tuple(i for i in self.attention_layers if not self.shares_kv(i))

    def shares_kv(self, layer: int) -> bool:
        """Return whether a layer attends to the K and V of another one, and has none."""
        return layer >= self.layers - self.kv_sharing_layers

    def kv_layer_of(self, layer: int) -> int:
        """Return the layer whose K and V a layer with attention attends to, its own usually.

        Raises:
            ValueError: it shares K and V, and no layer that keeps some sees as much as it does.
        """
        if not self.shares_kv(layer):
            return layer
        for source in reversed(self.kv_layers):
            if self.window_of(source) == self.window_of(layer):
                return source
        raise ValueError(f"no layer that keeps KV sees as much as layer {layer}")

    def gate_cutoff_of(self, layer: int) -> float | None:
        """Return ``gate_cutoffs`` of one layer."""
        return self.gate_cutoffs[layer] if self.gate_cutoffs else None

    @property
    def row_width(self) -> int:
        """Numbers of a hidden row as it goes from layer to layer."""
        if self.altup is None:
            return self.hidden
        return STREAMS * self.hidden + self.layers * self.altup.layer_width

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
    if config.altup is not None:
        shapes.update(config.altup.outer_shapes(config.hidden, config.layers))
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab, config.hidden)
    return shapes


def _layer_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    space = config.state_space_of(layer)
    shapes = {
        **(_norm_shapes(config, "attn_norm") if config.pre_norms else {}),
        **(_attention_shapes(config, layer) if space is None else _state_shapes(config, space)),
        **(_norm_shapes(config, "mlp_norm") if config.pre_norms else {}),
    }
    experts = config.experts_of(layer)
    if experts is None:
        shapes.update(_mlp_shapes(config, "", config.ffn))
    else:
        shapes.update(_expert_shapes(config, experts))
    if config.post_norms:
        shapes.update(_norm_shapes(config, "attn_post_norm"))
        shapes.update(_norm_shapes(config, "mlp_post_norm"))
    if (config.qk_norm or config.joint_qk_norm) and space is None:
        shapes["q_norm.weight"] = (config.q_norm_size,)
        if not config.shares_kv(layer):
            shapes["k_norm.weight"] = (config.k_norm_size,)
    if config.altup is not None:
        shapes.update(config.altup.layer_shapes(config.hidden))
    return shapes


def _attention_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    if config.latent is not None:
        return _latent_shapes(config, config.latent)
    query = config.query_heads * config.head_dim
    others: dict[str, Shape] = {"attn.sinks": (config.query_heads,)} if config.sinks else {}
    if config.gated_attention:
        others["q_gate.weight"] = (query, config.hidden)
    return others | {
        **_linear_shapes("q", query, config.hidden, config.qkv_bias),
        **({} if config.shares_kv(layer) else _key_shapes(config)),
        **_linear_shapes("o", config.hidden, query, config.output_bias),
    }


def _key_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return what computes keys and values."""
    key = config.kv_heads * config.head_dim
    return {
        **_linear_shapes("k", key, config.hidden, config.qkv_bias),
        **_linear_shapes("v", key, config.hidden, config.qkv_bias),
    }


def _latent_shapes(config: ModelConfig, latent: LatentAttention) -> dict[str, Shape]:
    heads, hidden, rank = config.query_heads, config.hidden, latent.query_rank
    shapes: dict[str, Shape] = {
        "kv_a.weight": (latent.key_dim, hidden),
        "kv_a_norm.weight": (latent.rank,),
        "o.weight": (hidden, heads * latent.value_dim),
    }
    if latent.stored_apart:
        shapes["k_b.weight"] = (heads * latent.rank, latent.plain_dim)
        shapes["v_b.weight"] = (heads * latent.value_dim, latent.rank)
    else:
        both = latent.plain_dim + latent.value_dim
        shapes["kv_b.weight"] = (heads * both, latent.rank)
    if not rank:
        return shapes | {"q.weight": (heads * latent.query_dim, hidden)}
    return shapes | {
        "q_a.weight": (rank, hidden),
        "q_a_norm.weight": (rank,),
        "q_b.weight": (heads * latent.query_dim, rank),
    }


def _state_shapes(config: ModelConfig, space: StateLayers) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {
        "ssm_conv.weight": (space.mixed, space.conv_width),
        "ssm.dt_bias": (space.heads,),
        "ssm_out.weight": (config.hidden, space.inner),
    }
    match space:
        case StateSpace():
            shapes["ssm_in.weight"] = (space.projected, config.hidden)
            shapes["ssm.A_log" if space.logarithmic else "ssm.A"] = (space.heads,)
            shapes["ssm.D"] = (space.heads,)
            shapes["ssm_norm.weight"] = (space.inner,)
            if space.conv_bias:
                shapes["ssm_conv.bias"] = (space.mixed,)
        case DeltaRule():
            shapes["ssm_gate.weight"] = (space.inner, config.hidden)
            shapes["ssm_qkv.weight"] = (space.mixed, config.hidden)
            shapes["ssm_beta.weight"] = shapes["ssm_alpha.weight"] = (space.heads, config.hidden)
            shapes["ssm.A_log" if space.logarithmic else "ssm.A"] = (space.heads,)
            shapes["ssm_norm.weight"] = (space.head_dim,)
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
    shapes = _linear_shapes("router", experts.count, config.hidden, experts.router_bias)
    if experts.corrected:
        shapes["router.e_score_correction_bias"] = (experts.count,)
    for expert in range(experts.count):
        shapes.update(_mlp_shapes(config, f"experts.{expert}.", experts.ffn))
    if experts.shared_ffn:
        if experts.shared_gated:
            shapes["shared_router.weight"] = (1, config.hidden)
        shapes.update(_mlp_shapes(config, "shared.", experts.shared_ffn))
    return shapes


def _linear_shapes(name: str, outputs: int, inputs: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    return weight | {f"{name}.bias": (outputs,)} if bias else weight


def _norm_shapes(config: ModelConfig, name: str) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (config.hidden,)}
    return weight | {f"{name}.bias": (config.hidden,)} if config.norm == "layer" else weight
