"""The tensors of a model: canonical names and shapes, derived from its ModelConfig."""

from midfill.models.config import ModelConfig

Shape = tuple[int, ...]


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return canonical name -> shape of every tensor of a model with this configuration.

    The names are explained in ``midfill.models.checkpoints.checkpoint``. A tied LM head is not
    listed.
    """
    shapes: dict[str, Shape] = {"embed.weight": (config.vocab, config.hidden)}
    for layer in range(config.layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"layers.{layer}.{name}"] = shape
    shapes.update(_norm_shapes(config, "final_norm"))
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab, config.hidden)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    query = config.query_heads * config.head_dim
    key = config.kv_heads * config.head_dim
    shapes = {
        **_norm_shapes(config, "attn_norm"),
        **_linear_shapes("q", query, config.hidden, config.qkv_bias),
        **_linear_shapes("k", key, config.hidden, config.qkv_bias),
        **_linear_shapes("v", key, config.hidden, config.qkv_bias),
        **_linear_shapes("o", config.hidden, query, config.output_bias),
        **_norm_shapes(config, "mlp_norm"),
        **_linear_shapes("up", config.ffn, config.hidden, config.mlp_bias),
        **_linear_shapes("down", config.hidden, config.ffn, config.mlp_bias),
    }
    if config.gated_mlp:
        shapes.update(_linear_shapes("gate", config.ffn, config.hidden, config.mlp_bias))
    if config.post_norms:
        shapes.update(_norm_shapes(config, "attn_post_norm"))
        shapes.update(_norm_shapes(config, "mlp_post_norm"))
    if config.qk_norm:
        shapes["q_norm.weight"] = shapes["k_norm.weight"] = (config.head_dim,)
    return shapes


def _linear_shapes(name: str, outputs: int, inputs: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    return weight | {f"{name}.bias": (outputs,)} if bias else weight


def _norm_shapes(config: ModelConfig, name: str) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (config.hidden,)}
    return weight | {f"{name}.bias": (config.hidden,)} if config.norm == "layer" else weight
