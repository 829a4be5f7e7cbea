"""Models of a larger shape with random weights: their text is meaningless, their speed is not.

A model's speed on a CPU depends on its shape and on how its weights are stored, not on their
values. So a comparison of servers on a larger model needs no download: its weights are drawn from
a seed and written as a GGUF file: layers as Q4_0 and the embedding as Q8_0, or Q4_K and Q6_K
matrix by matrix as llama.cpp's Q4_K_M has them; gpt-oss's experts as MXFP4 and all else as Q8_0.
The tokenizer is the default model's, filled up with unused tokens to the shape's vocabulary. Their
embeddings and those of special tokens are zero: with an embedding that is the output head as well,
greedy decoding never takes them.
"""

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import gguf
import numpy as np
import numpy.typing as npt
import typer
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from benchmarks.random_weights import draw
from midfill.cli.progress import show_steps
from midfill.errors import MidfillError, OptionError
from midfill.models.checkpoints.gguf_file import GgufFile
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve
from midfill.models.config import Experts, LatentAttention, StateSpace
from midfill.system.cache import cache_folder
from midfill.system.files import replacing_file
from midfill.system.machine import format_size

_BYTES_PER_WEIGHT = 5
"""Disk space for the file, what llama.cpp makes of it, and a folder in bfloat16 for vLLM."""
_TENSORS_PER_LINE = 32
"""Tensors that are written from one line of progress to the next."""


@dataclass(frozen=True)
class Shape:
    """A Llama model's dimensions, the embedding tied to the output head.

    With ``experts``, it is a Qwen3-MoE with a head of its own; with ``latent``, too, a DeepSeek-V2,
    whose ``head_dim`` and ``kv_heads`` say nothing; with experts and a ``window``, a gpt-oss, which
    has the window in every other layer. With a ``state_space``, it is a Granite 4.0-H, whose layers
    that are not among the state's have attention. ``k_quants`` stores it as Q4_K_M instead of Q4_0;
    all widths are multiples of 256 then.
    """

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
    state_space: StateSpace | None = None

    @property
    def architecture(self) -> str:
        """GGUF's name of its family."""
        if self.state_space is not None:
            return "granitehybrid"
        if self.latent is not None:
            return "deepseek2"
        if self.experts is None:
            return "llama"
        return "qwen3moe" if self.window is None else "gpt-oss"

    @property
    def file_type(self) -> gguf.LlamaFileType:
        """GGUF's name of what most of its weights are stored as."""
        if self.architecture == "gpt-oss":
            return gguf.LlamaFileType.MOSTLY_MXFP4_MOE
        if self.k_quants:
            return gguf.LlamaFileType.MOSTLY_Q4_K_M
        return gguf.LlamaFileType.MOSTLY_Q4_0

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention, ascending."""
        others = () if self.state_space is None else self.state_space.layers
        return tuple(layer for layer in range(self.layers) if layer not in others)

    @property
    def weights(self) -> int:
        """How many weights its matrices have."""
        return sum(math.prod(dimensions) for dimensions, _ in _tensors(self).values())


_1_5B = Shape(
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
    layers=40,
    hidden=2048,
    query_heads=32,
    kv_heads=8,
    head_dim=64,
    ffn=8192,
    vocab=100_352,
    context=131_072,
    rope_base=1e4,  # unused: its attention knows no positions
    state_space=StateSpace(
        layers=tuple(layer for layer in range(40) if layer not in (5, 15, 25, 35)),
        heads=64,
        head_dim=64,
        state_dim=128,
        conv_width=4,
    ),
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
}
_YARN_FACTOR = 32
"""How much longer gpt-oss's context is than that of its first training."""


def random_model(
    name: str, progress: Callable[[str], None] = lambda _: None, layers: int | None = None
) -> Path:
    """Return the GGUF file of a shape with random weights, written into the cache folder once.

    Args:
        name: one of ``SHAPES``.
        progress: receives what is being written.
        layers: so many layers instead of the shape's own.

    Raises:
        MidfillError: no such shape, too few layers, too little disk space, or the file can't be
            written.
    """
    if name not in SHAPES:
        raise OptionError(f"there is no shape {name}; there are {', '.join(SHAPES)}")
    shape = SHAPES[name] if layers is None else replace(SHAPES[name], layers=layers)
    if not shape.attention_layers:
        least = SHAPES[name].attention_layers[0] + 1
        raise OptionError(f"{name} has no attention in its first {layers} layers: --layers {least}")
    cut = "" if layers is None else f"-{layers}-layers"
    path = cache_folder() / "peers" / f"random-{name}{cut}.gguf"
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        needed = shape.weights * _BYTES_PER_WEIGHT
        if shutil.disk_usage(path.parent).free < needed:
            raise MidfillError(
                f"shape {name} needs {format_size(needed)} of disk space in {path.parent}"
            )
        with replacing_file(path) as temporary:
            write_random_model(shape, GgufFile(resolve(DEFAULT_MODEL)), temporary, progress)
    except OSError as error:
        raise MidfillError(f"{path} can't be written: {error.strerror}") from None
    return path


def write_random_model(
    shape: Shape,
    tokens_from: GgufFile,
    path: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Write a GGUF file of a shape, the same bytes on every call.

    Args:
        tokens_from: the file whose tokenizer is taken; of the Llama architecture.
        path: the file to write.

    Raises:
        MidfillError: the tokenizer has more tokens than the shape's vocabulary.
    """
    writer = gguf.GGUFWriter(path, shape.architecture)
    # OpenVINO reads no file without it.
    writer.add_file_type(shape.file_type)
    _add_dimensions(writer, shape)
    ordinary = _add_tokenizer(writer, tokens_from, shape.vocab)
    tensors = _tensors(shape)
    for name, (dimensions, kind) in tensors.items():
        block, size = GGML_QUANT_SIZES[kind]
        dtype = np.dtype(np.float32 if kind is GGMLQuantizationType.F32 else np.uint8)
        stored = (*dimensions[:-1], dimensions[-1] // block * size // dtype.itemsize)
        count = int(np.prod(stored)) * dtype.itemsize
        raw = None if kind is GGMLQuantizationType.F32 else kind
        writer.add_tensor_info(name, stored, dtype, count, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for number, (name, (dimensions, kind)) in enumerate(tensors.items()):
        if number % _TENSORS_PER_LINE == 0:
            progress(f"random weights: tensor {number + 1} of {len(tensors)}")
        mask = ordinary if name in ("token_embd.weight", "output.weight") else None
        drawn = draw(name, dimensions, kind, random, mask)
        writer.write_tensor_data(np.concatenate(list(drawn)))
    writer.close()


def _add_dimensions(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Write what a file says of a model's shape."""
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.query_heads)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.vocab)
    experts, latent = shape.experts, shape.latent
    if shape.state_space is not None:
        _add_state_space(writer, shape, shape.state_space)
    else:
        writer.add_head_count_kv(shape.kv_heads)
    if experts is None:
        writer.add_rope_dimension_count(shape.head_dim)
        return
    writer.add_expert_count(experts.count)
    writer.add_expert_used_count(experts.per_token)
    writer.add_expert_feed_forward_length(experts.ffn)
    if latent is None:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
        if shape.window is not None:
            writer.add_sliding_window(shape.window)
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(_YARN_FACTOR)
            writer.add_rope_scaling_orig_ctx_len(shape.context // _YARN_FACTOR)
        return
    writer.add_expert_shared_count(experts.shared_ffn // experts.ffn)
    writer.add_leading_dense_block_count(len(experts.dense_layers))
    writer.add_rope_dimension_count(latent.rotary_dim)
    writer.add_kv_lora_rank(latent.rank)
    writer.add_key_length(latent.key_dim)
    writer.add_value_length(latent.rank)
    writer.add_key_length_mla(latent.query_dim)
    writer.add_value_length_mla(latent.value_dim)


def _add_state_space(writer: gguf.GGUFWriter, shape: Shape, space: StateSpace) -> None:
    """Write what a file says of a Granite 4.0-H's states, and its four scalars."""
    attention = shape.attention_layers
    writer.add_head_count_kv([shape.kv_heads * (i in attention) for i in range(shape.layers)])
    writer.add_rope_scaling_finetuned(False)  # queries and keys aren't rotated
    writer.add_attention_scale(1 / shape.head_dim)
    writer.add_embedding_scale(12.0)
    writer.add_residual_scale(0.22)
    writer.add_logit_scale(8.0)
    writer.add_ssm_conv_kernel(space.conv_width)
    writer.add_ssm_state_size(space.state_dim)
    writer.add_ssm_inner_size(space.inner)
    writer.add_ssm_time_step_rank(space.heads)
    writer.add_ssm_group_count(1)


def _add_tokenizer(writer: gguf.GGUFWriter, source: GgufFile, vocab: int) -> npt.NDArray[np.bool_]:
    """Copy a tokenizer, filled up with unused tokens; return which tokens are ordinary ones."""
    of: Mapping[str, Any] = source.metadata
    tokens: list[str] = [*of["tokenizer.ggml.tokens"]]
    types: list[int] = [*of["tokenizer.ggml.token_type"]]
    if len(tokens) > vocab:
        raise MidfillError(f"{len(tokens)} tokens don't fit into a vocabulary of {vocab}")
    tokens += [f"[PAD{place}]" for place in range(len(tokens), vocab)]
    types += [int(gguf.TokenType.UNUSED)] * (vocab - len(types))
    writer.add_tokenizer_model(of["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(of["tokenizer.ggml.pre"])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(of["tokenizer.ggml.merges"])
    writer.add_add_bos_token(bool(of.get("tokenizer.ggml.add_bos_token", False)))
    writer.add_add_space_prefix(bool(of.get("tokenizer.ggml.add_space_prefix", False)))
    for name, add in {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "unknown": writer.add_unk_token_id,
        "padding": writer.add_pad_token_id,
    }.items():
        if (token := of.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            add(token)
    return np.equal(types, int(gguf.TokenType.NORMAL))


Tensors = dict[str, tuple[tuple[int, ...], GGMLQuantizationType]]
"""Name -> (rows and columns, how it is stored), in the order of the file."""


def _tensors(shape: Shape) -> Tensors:
    """Return all tensors of a file."""
    norm, embedding = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0
    usual = more = GGMLQuantizationType.Q4_0
    if shape.k_quants:
        usual, more = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K
        embedding = more
    is_gpt_oss = shape.architecture == "gpt-oss"
    if is_gpt_oss:
        usual = more = embedding
    tensors: Tensors = {
        "token_embd.weight": ((shape.vocab, shape.hidden), embedding),
        "output_norm.weight": ((shape.hidden,), norm),
    }
    if shape.experts is not None:
        tensors["output.weight"] = ((shape.vocab, shape.hidden), more)
    for layer in range(shape.layers):
        precise = more if _has_more_bits(layer, shape.layers) else usual
        if shape.state_space is not None and layer in shape.state_space.layers:
            parts = _state_tensors(shape, shape.state_space, usual)
        elif shape.latent is None:
            parts = _attention_tensors(shape, usual, precise)
        else:
            parts = _latent_tensors(shape, shape.latent, usual)
        if is_gpt_oss:
            usual_mlp = precise_mlp = GGMLQuantizationType.MXFP4
        else:
            usual_mlp, precise_mlp = usual, precise
        parts |= _mlp_tensors(shape, layer, usual_mlp, precise_mlp)
        tensors |= {_stored_name(layer, name): tensor for name, tensor in parts.items()}
    return tensors


def _stored_name(layer: int, part: str) -> str:
    """Return a tensor's name: of a weight, unless it says otherwise, or is no part of a product."""
    is_whole = part.endswith(".bias") or part in ("ssm_a", "ssm_d")
    return f"blk.{layer}.{part}" if is_whole else f"blk.{layer}.{part}.weight"


def _attention_tensors(
    shape: Shape, usual: GGMLQuantizationType, precise: GGMLQuantizationType
) -> Tensors:
    """Return a layer's attention, of which V is stored more precisely in some layers."""
    query, key = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norm = GGMLQuantizationType.F32
    tensors: Tensors = {
        "attn_norm": ((shape.hidden,), norm),
        "attn_q": ((query, shape.hidden), usual),
        "attn_k": ((key, shape.hidden), usual),
        "attn_v": ((key, shape.hidden), precise),
        "attn_output": ((shape.hidden, query), usual),
    }
    if shape.architecture == "qwen3moe":
        tensors |= {f"attn_{part}_norm": ((shape.head_dim,), norm) for part in "qk"}
    if shape.architecture == "gpt-oss":
        rows = {name: tensors[f"attn_{name}"][0][0] for name in ("q", "k", "v", "output")}
        tensors |= {f"attn_{name}.bias": ((count,), norm) for name, count in rows.items()}
        tensors["attn_sinks"] = ((shape.query_heads,), norm)
    return tensors


def _state_tensors(shape: Shape, space: StateSpace, kind: GGMLQuantizationType) -> Tensors:
    """Return a Mamba-2 layer's own tensors."""
    plain = GGMLQuantizationType.F32
    return {
        "attn_norm": ((shape.hidden,), plain),
        "ssm_in": ((space.projected, shape.hidden), kind),
        "ssm_conv1d": ((space.mixed, space.conv_width), plain),
        "ssm_conv1d.bias": ((space.mixed,), plain),
        "ssm_dt.bias": ((space.heads,), plain),
        "ssm_a": ((space.heads, 1), plain),
        "ssm_d": ((space.heads, 1), plain),
        "ssm_norm": ((1, space.inner), plain),
        "ssm_out": ((shape.hidden, space.inner), kind),
    }


def _latent_tensors(shape: Shape, latent: LatentAttention, kind: GGMLQuantizationType) -> Tensors:
    """Return a layer's latent attention."""
    heads, hidden, norm = shape.query_heads, shape.hidden, GGMLQuantizationType.F32
    return {
        "attn_norm": ((hidden,), norm),
        "attn_q": ((heads * latent.query_dim, hidden), kind),
        "attn_kv_a_mqa": ((latent.key_dim, hidden), kind),
        "attn_kv_a_norm": ((latent.rank,), norm),
        "attn_k_b": ((heads, latent.rank, latent.plain_dim), kind),
        "attn_v_b": ((heads, latent.value_dim, latent.rank), kind),
        "attn_output": ((hidden, heads * latent.value_dim), kind),
    }


def _mlp_tensors(
    shape: Shape, layer: int, usual: GGMLQuantizationType, precise: GGMLQuantizationType
) -> Tensors:
    """Return a layer's MLP, or its router and experts; down projections are those of V's kind."""
    hidden, norm, experts = shape.hidden, GGMLQuantizationType.F32, shape.experts
    is_gpt_oss = shape.architecture == "gpt-oss"
    tensors: Tensors = {"post_attention_norm" if is_gpt_oss else "ffn_norm": ((hidden,), norm)}
    if experts is None or layer in experts.dense_layers:
        sizes: dict[str, tuple[tuple[int, ...], int]] = {"": ((), shape.ffn)}
    else:
        tensors["ffn_gate_inp"] = ((experts.count, hidden), norm)
        sizes = {"_exps": ((experts.count,), experts.ffn)}
        if experts.shared_ffn:
            sizes["_shexp"] = ((), experts.shared_ffn)
    for end, (stack, ffn) in sizes.items():
        tensors |= {
            f"ffn_gate{end}": ((*stack, ffn, hidden), usual),
            f"ffn_up{end}": ((*stack, ffn, hidden), usual),
            f"ffn_down{end}": ((*stack, hidden, ffn), precise),
        }
    if is_gpt_oss:
        biased = [name for name in tensors if name.endswith(("_inp", "_exps"))]
        tensors |= {f"{name}.bias": (tensors[name][0][:-1], norm) for name in biased}
    return tensors


def _has_more_bits(layer: int, layers: int) -> bool:
    """Return whether a layer's V and down projection are stored more precisely in Q4_K_M."""
    first = layers // 8
    return layer < first or layer >= layers - first or (layer - first) % 3 == 2


ShapeOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Take a model of this shape with random weights instead, see 'shape'.",
    ),
]
ShapeArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="1.5b (1 GB; with what is made of it for peers 5 GB), 7b (4 GB), 30b-a3b (17 GB),"
        " these as 1.5b-q4_k_m, 7b-q4_k_m and 30b-a3b-q4_k_m, too, coder-v2-lite (9 GB),"
        " gpt-oss-20b (12 GB) and granite-4.0-h-micro (2 GB).",
    ),
]
LayersOption = Annotated[
    int | None,
    typer.Option(min=1, help="Write so many layers instead of the shape's own."),
]


def model_or_shape(
    model: str | None, shape: str | None, progress: Callable[[str], None] = lambda _: None
) -> str:
    """Return the model to load: the one named, one of a shape, or the default model.

    Raises:
        MidfillError: both are given, or a model of the shape can't be made.
    """
    if shape is not None and model is not None:
        raise OptionError("--shape makes a model of its own: it goes without a model")
    return str(random_model(shape, progress)) if shape else model or DEFAULT_MODEL


def shape(name: ShapeArgument, layers: LayersOption = None) -> None:
    """Write a model of a shape with random weights into the cache folder once; print its path."""
    with show_steps("preparing") as progress:
        path = random_model(name, progress, layers)
    typer.echo(path)
