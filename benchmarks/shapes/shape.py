"""Dimensions of models that people run, by name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from midfill.models.altup import AltUp
from midfill.models.config import DeltaRule, Experts, LatentAttention, StateSpace


@dataclass(frozen=True)
class Shape:
    """A model's dimensions, the embedding tied to the output head unless its family has another.

    Attributes:
        architecture: GGUF's name of its family.
        layers, hidden, query_heads, kv_heads, head_dim, ffn, vocab, context: see ``ModelConfig``;
            with ``latent``, ``kv_heads`` and ``head_dim`` say nothing.
        rope_base: base of the rotations' frequencies.
        k_quants: whether it is stored as Q4_K_M instead of Q4_0; all widths are multiples of 256
            then.
        experts: its mixtures, if it has any.
        latent: its latent attention, if it has that.
        window: keys that layers with a sliding window see, if it has any.
        states: layers that have a state instead of attention.
        altup: its streams of hidden rows, if it has any.
        kv_sharing_layers: the last layers, which take keys and values of earlier ones.
    """

    architecture: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    rope_base: float
    k_quants: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    window: int | None = None
    states: StateSpace | DeltaRule | None = None
    altup: AltUp | None = None
    kv_sharing_layers: int = 0

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention, ascending."""
        others = () if self.states is None else self.states.layers
        return tuple(layer for layer in range(self.layers) if layer not in others)

    @property
    def least_layers(self) -> int:
        """How many of its first layers have attention of all kinds, with keys of their own."""
        if self.kv_sharing_layers:
            return self.kv_sharing_layers + 5  # the fifth sees everything, others have the window
        others = () if self.states is None else self.states.layers
        return 1 + next(layer for layer in range(len(others) + 1) if layer not in others)

    @property
    def has_head(self) -> bool:
        """Whether the output head is a matrix of its own."""
        return self.experts is not None or self.architecture == "olmo2"


_1_5B = Shape(
    architecture="llama",
    layers=28,
    hidden=1536,
    query_heads=12,
    kv_heads=2,
    head_dim=128,
    ffn=8960,
    vocab=151_936,
    context=32_768,
    rope_base=1e6,
)
_7B = Shape(
    architecture="llama",
    layers=28,
    hidden=3584,
    query_heads=28,
    kv_heads=4,
    head_dim=128,
    ffn=18_944,
    vocab=152_064,
    context=32_768,
    rope_base=1e6,
)
_30B_A3B = Shape(
    architecture="qwen3moe",
    layers=48,
    hidden=2048,
    query_heads=32,
    kv_heads=4,
    head_dim=128,
    ffn=6144,
    vocab=151_936,
    context=32_768,
    rope_base=1e7,
    experts=Experts(count=128, per_token=8, ffn=768, normalised=True),
)
_CODER_V2_LITE = Shape(
    architecture="deepseek2",
    layers=27,
    hidden=2048,
    query_heads=16,
    kv_heads=1,
    head_dim=576,
    ffn=10_944,
    vocab=102_400,
    context=4096,
    rope_base=1e4,
    experts=Experts(
        count=64,
        per_token=6,
        ffn=1408,
        normalised=False,
        shared_ffn=2816,
        shared_gated=False,
        dense_layers=(0,),
    ),
    latent=LatentAttention(query_rank=0, rank=512, plain_dim=128, rotary_dim=64, value_dim=128),
)
_GPT_OSS_20B = Shape(
    architecture="gpt-oss",
    layers=24,
    hidden=2880,
    query_heads=64,
    kv_heads=8,
    head_dim=64,
    ffn=2880,
    vocab=201_088,
    context=131_072,
    rope_base=150_000.0,
    experts=Experts(count=32, per_token=4, ffn=2880, normalised=True, router_bias=True),
    window=128,
)
_GRANITE_H_MICRO = Shape(
    architecture="granitehybrid",
    layers=40,
    hidden=2048,
    query_heads=32,
    kv_heads=8,
    head_dim=64,
    ffn=8192,
    vocab=100_352,
    context=131_072,
    rope_base=1e4,  # unused: its attention knows no positions
    states=StateSpace(
        layers=tuple(layer for layer in range(40) if layer not in (5, 15, 25, 35)),
        heads=64,
        head_dim=64,
        state_dim=128,
        conv_width=4,
    ),
)
_NEXT_80B_A3B = Shape(
    architecture="qwen3next",
    layers=48,
    hidden=2048,
    query_heads=16,
    kv_heads=2,
    head_dim=256,
    ffn=5120,
    vocab=151_936,
    context=262_144,
    rope_base=1e7,
    experts=Experts(count=512, per_token=10, ffn=512, normalised=True, shared_ffn=512),
    states=DeltaRule(
        layers=tuple(layer for layer in range(48) if (layer + 1) % 4),
        heads=32,
        head_dim=128,
        state_dim=128,
        conv_width=4,
        key_heads=16,
    ),
)
_OLMO2_7B = Shape(
    architecture="olmo2",
    layers=32,
    hidden=4096,
    query_heads=32,
    kv_heads=32,
    head_dim=128,
    ffn=11_008,
    vocab=100_352,
    context=4096,
    rope_base=500_000.0,
)
_GEMMA3N_E2B = Shape(
    architecture="gemma3n",
    layers=30,
    hidden=2048,
    query_heads=8,
    kv_heads=2,
    head_dim=256,
    ffn=8192,
    vocab=262_144,
    context=32_768,
    rope_base=1e6,
    window=512,
    altup=AltUp(laurel_rank=64, layer_width=256, layer_vocab=262_144),
    kv_sharing_layers=10,
)
# Qwen3-Coder-30B-A3B's, and Qwen2.5's, without the biases of Q, K and V, and with tied embeddings;
# DeepSeek-Coder-V2-Lite's with its context as it was before YaRN.
SHAPES: Mapping[str, Shape] = {
    "1.5b": _1_5B,
    "1.5b-q4_k_m": replace(_1_5B, k_quants=True),
    "7b": _7B,
    "7b-q4_k_m": replace(_7B, k_quants=True),
    "30b-a3b": _30B_A3B,
    "30b-a3b-q4_k_m": replace(_30B_A3B, k_quants=True),
    "coder-v2-lite": _CODER_V2_LITE,
    "gpt-oss-20b": _GPT_OSS_20B,
    "granite-4.0-h-micro": _GRANITE_H_MICRO,
    "qwen3-next-80b-a3b": _NEXT_80B_A3B,
    "olmo2-7b": _OLMO2_7B,
    "gemma-3n-e2b": _GEMMA3N_E2B,
}
