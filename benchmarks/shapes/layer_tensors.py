"""The tensors of a GGUF file by a model's shape: names, dimensions and how each is stored."""

import math

from gguf.constants import GGMLQuantizationType

from benchmarks.shapes.shape import Shape
from midfill.models.altup import STREAMS, AltUp
from midfill.models.config import DeltaRule, LatentAttention, StateSpace

Tensors = dict[str, tuple[tuple[int, ...], GGMLQuantizationType]]
"""Name -> (rows and columns, how it is stored), in the order of the file."""

_PLAIN = GGMLQuantizationType.F32


def tensors_of(shape: Shape) -> Tensors:
    """Return all tensors of a file."""
    embedding = GGMLQuantizationType.Q8_0
    usual = more = GGMLQuantizationType.Q4_0
    if shape.k_quants:
        usual, more = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K
        embedding = more
    if shape.architecture == "gpt-oss":
        usual = more = embedding
    tensors: Tensors = {
        "token_embd.weight": ((shape.vocab, shape.hidden), embedding),
        "output_norm.weight": ((shape.hidden,), _PLAIN),
    }
    if shape.has_head:
        tensors["output.weight"] = ((shape.vocab, shape.hidden), more)
    if shape.altup is not None:
        tensors |= _outer_altup_tensors(shape, shape.altup, usual, embedding)
    for layer in range(shape.layers):
        precise = more if _has_more_bits(layer, shape.layers) else usual
        parts = _mixer_tensors(shape, layer, usual, precise)
        if shape.architecture == "gpt-oss":
            parts |= _mlp_tensors(shape, layer, *2 * [GGMLQuantizationType.MXFP4])
        else:
            parts |= _mlp_tensors(shape, layer, usual, precise)
        if shape.altup is not None:
            parts |= _altup_tensors(shape, shape.altup, usual)
        tensors |= {_stored_name(layer, name): tensor for name, tensor in parts.items()}
    return tensors


def weights_of(shape: Shape) -> int:
    """Return how many weights a model has."""
    return sum(math.prod(dimensions) for dimensions, _ in tensors_of(shape).values())


def _stored_name(layer: int, part: str) -> str:
    """Return a tensor's name: of a weight, unless it says otherwise, or is no part of a product."""
    is_whole = part.endswith(".bias") or part in ("ssm_a", "ssm_d")
    return f"blk.{layer}.{part}" if is_whole else f"blk.{layer}.{part}.weight"


def _mixer_tensors(
    shape: Shape, layer: int, usual: GGMLQuantizationType, precise: GGMLQuantizationType
) -> Tensors:
    """Return what a layer has before its MLP: attention of one kind, or a state."""
    states = shape.states
    if states is not None and layer in states.layers:
        if isinstance(states, DeltaRule):
            return _delta_rule_tensors(shape, states, usual)
        return _state_tensors(shape, states, usual)
    if shape.latent is not None:
        return _latent_tensors(shape, shape.latent, usual)
    return _attention_tensors(shape, usual, precise)


def _attention_tensors(
    shape: Shape, usual: GGMLQuantizationType, precise: GGMLQuantizationType
) -> Tensors:
    """Return a layer's attention, of which V is stored more precisely in some layers."""
    query, key = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    hidden = shape.hidden
    # Qwen3-Next's queries have a gate each.
    rows = query * 2 if shape.architecture == "qwen3next" else query
    tensors: Tensors = {
        "attn_norm": ((hidden,), _PLAIN),
        "attn_q": ((rows, hidden), usual),
        "attn_k": ((key, hidden), usual),
        "attn_v": ((key, hidden), precise),
        "attn_output": ((hidden, query), usual),
    }
    if shape.architecture in ("qwen3moe", "qwen3next", "gemma3n"):
        tensors |= {f"attn_{part}_norm": ((shape.head_dim,), _PLAIN) for part in "qk"}
    if shape.architecture == "gemma3n":
        tensors["post_attention_norm"] = ((hidden,), _PLAIN)
    if shape.architecture == "olmo2":
        del tensors["attn_norm"]
        tensors |= {
            "attn_q_norm": ((query,), _PLAIN),
            "attn_k_norm": ((key,), _PLAIN),
            "post_attention_norm": ((hidden,), _PLAIN),
        }
    if shape.architecture == "gpt-oss":
        biased = {name: tensors[f"attn_{name}"][0][0] for name in ("q", "k", "v", "output")}
        tensors |= {f"attn_{name}.bias": ((count,), _PLAIN) for name, count in biased.items()}
        tensors["attn_sinks"] = ((shape.query_heads,), _PLAIN)
    return tensors


def _state_tensors(shape: Shape, space: StateSpace, kind: GGMLQuantizationType) -> Tensors:
    """Return a Mamba-2 layer's own tensors."""
    return {
        "attn_norm": ((shape.hidden,), _PLAIN),
        "ssm_in": ((space.projected, shape.hidden), kind),
        "ssm_conv1d": ((space.mixed, space.conv_width), _PLAIN),
        "ssm_conv1d.bias": ((space.mixed,), _PLAIN),
        "ssm_dt.bias": ((space.heads,), _PLAIN),
        "ssm_a": ((space.heads, 1), _PLAIN),
        "ssm_d": ((space.heads, 1), _PLAIN),
        "ssm_norm": ((1, space.inner), _PLAIN),
        "ssm_out": ((shape.hidden, space.inner), kind),
    }


def _delta_rule_tensors(shape: Shape, rule: DeltaRule, kind: GGMLQuantizationType) -> Tensors:
    """Return the tensors of a layer with the gated delta rule."""
    return {
        "attn_norm": ((shape.hidden,), _PLAIN),
        "attn_qkv": ((rule.mixed, shape.hidden), kind),
        "attn_gate": ((rule.inner, shape.hidden), kind),
        "ssm_ba": ((2 * rule.heads, shape.hidden), _PLAIN),
        "ssm_conv1d": ((rule.mixed, rule.conv_width), _PLAIN),
        "ssm_dt.bias": ((rule.heads,), _PLAIN),
        "ssm_a": ((rule.heads,), _PLAIN),
        "ssm_norm": ((rule.head_dim,), _PLAIN),
        "ssm_out": ((shape.hidden, rule.inner), kind),
    }


def _latent_tensors(shape: Shape, latent: LatentAttention, kind: GGMLQuantizationType) -> Tensors:
    """Return a layer's latent attention."""
    heads, hidden = shape.query_heads, shape.hidden
    return {
        "attn_norm": ((hidden,), _PLAIN),
        "attn_q": ((heads * latent.query_dim, hidden), kind),
        "attn_kv_a_mqa": ((latent.key_dim, hidden), kind),
        "attn_kv_a_norm": ((latent.rank,), _PLAIN),
        "attn_k_b": ((heads, latent.rank, latent.plain_dim), kind),
        "attn_v_b": ((heads, latent.value_dim, latent.rank), kind),
        "attn_output": ((hidden, heads * latent.value_dim), kind),
    }


def _altup_tensors(shape: Shape, altup: AltUp, kind: GGMLQuantizationType) -> Tensors:
    """Return what a layer has for streams of hidden rows and embeddings of its own."""
    hidden, width, rank = shape.hidden, altup.layer_width, altup.laurel_rank
    return {
        "altup_correct_coef": ((STREAMS, STREAMS), _PLAIN),
        "altup_correct_scale": ((hidden,), _PLAIN),
        "altup_predict_coef": ((STREAMS**2, STREAMS), _PLAIN),
        "altup_router": ((STREAMS, hidden), _PLAIN),
        "altup_router_norm": ((hidden,), _PLAIN),
        "laurel_l": ((rank, hidden), kind),
        "laurel_r": ((hidden, rank), kind),
        "laurel_post_norm": ((hidden,), _PLAIN),
        "inp_gate": ((width, hidden), kind),
        "proj": ((hidden, width), kind),
        "post_norm": ((hidden,), _PLAIN),
    }


def _outer_altup_tensors(
    shape: Shape, altup: AltUp, usual: GGMLQuantizationType, embedding: GGMLQuantizationType
) -> Tensors:
    """Return what a model has beside its layers for streams and embeddings for each layer."""
    hidden, embedded = shape.hidden, shape.layers * altup.layer_width
    streams = (STREAMS - 1, hidden, hidden)
    return {
        "per_layer_token_embd.weight": ((altup.layer_vocab, embedded), embedding),
        "per_layer_model_proj.weight": ((embedded, hidden), usual),
        "per_layer_proj_norm.weight": ((altup.layer_width,), _PLAIN),
        "altup_proj.weight": (streams, usual),
        "altup_unembd_proj.weight": (streams, usual),
    }


_MLP_NORMS = {
    "gpt-oss": ("post_attention_norm",),
    "qwen3next": ("post_attention_norm",),
    "olmo2": ("post_ffw_norm",),
    "gemma3n": ("ffn_norm", "post_ffw_norm"),
}
"""Architecture -> names of the norms of its MLP, where they aren't the usual one."""


def _mlp_tensors(
    shape: Shape, layer: int, usual: GGMLQuantizationType, precise: GGMLQuantizationType
) -> Tensors:
    """Return a layer's MLP, or its router and experts; down projections are those of V's kind."""
    hidden, experts = shape.hidden, shape.experts
    norms = _MLP_NORMS.get(shape.architecture, ("ffn_norm",))
    tensors: Tensors = dict.fromkeys(norms, ((hidden,), _PLAIN))
    if experts is None or layer in experts.dense_layers:
        sizes: dict[str, tuple[tuple[int, ...], int]] = {"": ((), shape.ffn)}
    else:
        tensors["ffn_gate_inp"] = ((experts.count, hidden), _PLAIN)
        sizes = {"_exps": ((experts.count,), experts.ffn)}
        if experts.shared_ffn:
            sizes["_shexp"] = ((), experts.shared_ffn)
            if experts.shared_gated:
                tensors["ffn_gate_inp_shexp"] = ((hidden,), _PLAIN)
    for end, (stack, ffn) in sizes.items():
        tensors |= {
            f"ffn_gate{end}": ((*stack, ffn, hidden), usual),
            f"ffn_up{end}": ((*stack, ffn, hidden), usual),
            f"ffn_down{end}": ((*stack, hidden, ffn), precise),
        }
    if shape.architecture == "gpt-oss":
        biased = [name for name in tensors if name.endswith(("_inp", "_exps"))]
        tensors |= {f"{name}.bias": (tensors[name][0][:-1], _PLAIN) for name in biased}
    return tensors


def _has_more_bits(layer: int, layers: int) -> bool:
    """Return whether a layer's V and down projection are stored more precisely in Q4_K_M."""
    first = layers // 8
    return layer < first or layer >= layers - first or (layer - first) % 3 == 2
