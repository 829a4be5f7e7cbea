"""Models of a larger shape with random weights: their text is meaningless, their speed is not.

A model's speed on a CPU depends on its shape and on how its weights are stored, not on their
values. So a comparison of servers on a larger model needs no download: its weights are drawn from
a seed and written as a GGUF file: layers as Q4_0 and the embedding as Q8_0, or Q4_K and Q6_K
matrix by matrix as llama.cpp's Q4_K_M has them. The tokenizer is the
default model's, filled up with unused tokens to the shape's vocabulary. Their embeddings and those
of special tokens are zero: with an embedding that is the output head as well, greedy decoding
never takes them.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import gguf
import numpy as np
import numpy.typing as npt
import typer
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from midfill.cli.progress import show_steps
from midfill.errors import MidfillError, OptionError
from midfill.models.checkpoints.gguf_file import GgufFile
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve
from midfill.models.config import Experts, LatentAttention
from midfill.system.cache import cache_folder
from midfill.system.files import replacing_file
from midfill.system.machine import format_size

_MAX_ROWS = 16_384  # of a tensor drawn at a time
_BYTES_PER_WEIGHT = 5
"""Disk space for the file, what llama.cpp makes of it, and a folder in bfloat16 for vLLM."""


@dataclass(frozen=True)
class Shape:
    """A Llama model's dimensions, the embedding tied to the output head.

    With ``experts``, it is a Qwen3-MoE with a head of its own; with ``latent``, too, a DeepSeek-V2,
    whose ``head_dim`` and ``kv_heads`` say nothing. ``k_quants`` stores it as Q4_K_M instead of
    Q4_0; all widths are multiples of 256 then.
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

    @property
    def architecture(self) -> str:
        """GGUF's name of its family."""
        if self.latent is not None:
            return "deepseek2"
        return "llama" if self.experts is None else "qwen3moe"

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
}


def random_model(
    name: str, progress: Callable[[str], None] = lambda _: None, layers: int | None = None
) -> Path:
    """Return the GGUF file of a shape with random weights, written into the cache folder once.

    Args:
        name: one of ``SHAPES``.
        progress: receives what is being written.
        layers: so many layers instead of the shape's own.

    Raises:
        MidfillError: no such shape, too little disk space, or the file can't be written.
    """
    if name not in SHAPES:
        raise OptionError(f"there is no shape {name}; there are {', '.join(SHAPES)}")
    shape = SHAPES[name] if layers is None else replace(SHAPES[name], layers=layers)
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
        progress(f"random weights: tensor {number + 1} of {len(tensors)}")
        mask = ordinary if name in ("token_embd.weight", "output.weight") else None
        writer.write_tensor_data(np.concatenate(list(_draw(dimensions, kind, random, mask))))
    writer.close()


def _add_dimensions(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Write what a file says of a model's shape."""
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.query_heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.vocab)
    experts, latent = shape.experts, shape.latent
    if experts is None:
        writer.add_rope_dimension_count(shape.head_dim)
        return
    writer.add_expert_count(experts.count)
    writer.add_expert_used_count(experts.per_token)
    writer.add_expert_feed_forward_length(experts.ffn)
    if latent is None:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
        return
    writer.add_expert_shared_count(experts.shared_ffn // experts.ffn)
    writer.add_leading_dense_block_count(len(experts.dense_layers))
    writer.add_rope_dimension_count(latent.rotary_dim)
    writer.add_kv_lora_rank(latent.rank)
    writer.add_key_length(latent.key_dim)
    writer.add_value_length(latent.rank)
    writer.add_key_length_mla(latent.query_dim)
    writer.add_value_length_mla(latent.value_dim)


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
    tensors: Tensors = {
        "token_embd.weight": ((shape.vocab, shape.hidden), embedding),
        "output_norm.weight": ((shape.hidden,), norm),
    }
    if shape.experts is not None:
        tensors["output.weight"] = ((shape.vocab, shape.hidden), more)
    for layer in range(shape.layers):
        precise = more if _has_more_bits(layer, shape.layers) else usual
        if shape.latent is None:
            parts = _attention_tensors(shape, usual, precise)
        else:
            parts = _latent_tensors(shape, shape.latent, usual)
        parts |= _mlp_tensors(shape, layer, usual, precise)
        tensors |= {f"blk.{layer}.{name}.weight": tensor for name, tensor in parts.items()}
    return tensors


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
    if shape.experts is not None:
        tensors |= {f"attn_{part}_norm": ((shape.head_dim,), norm) for part in "qk"}
    return tensors


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
    tensors: Tensors = {"ffn_norm": ((hidden,), norm)}
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
    return tensors


def _has_more_bits(layer: int, layers: int) -> bool:
    """Return whether a layer's V and down projection are stored more precisely in Q4_K_M."""
    first = layers // 8
    return layer < first or layer >= layers - first or (layer - first) % 3 == 2


def _draw(
    dimensions: tuple[int, ...],
    kind: GGMLQuantizationType,
    random: np.random.Generator,
    mask: npt.NDArray[np.bool_] | None,
) -> Iterator[npt.NDArray[np.generic]]:
    """Rows of a tensor as they are stored: norms are 1, others uniform with deviation 0.02.

    Args:
        mask: bool [rows]: where False, a row is zero.
    """
    if kind is GGMLQuantizationType.F32:
        if len(dimensions) == 1:
            yield np.ones(dimensions, np.float32)
        else:  # a router's
            yield (random.random(dimensions, np.float32) - np.float32(0.5)) * np.float32(
                0.02 * 12**0.5
            )
        return
    rows, columns = math.prod(dimensions[:-1]), dimensions[-1]
    block, size = GGML_QUANT_SIZES[kind]
    for start in range(0, rows, _MAX_ROWS):
        count = min(_MAX_ROWS, rows - start)
        blocks = random.integers(0, 256, (count, columns // block, size), np.uint8)
        zero = None if mask is None else ~mask[start : start + count]
        _set_scales(blocks, kind, zero)
        yield blocks.reshape(count, -1)


def _set_scales(
    blocks: npt.NDArray[np.uint8],
    kind: GGMLQuantizationType,
    zero: npt.NDArray[np.bool_] | None,
) -> None:
    """Give random blocks float16 scales by which weights have a deviation of 0.02.

    Integer scales are left as they are, uniform in their range.
    """
    uniform = math.sqrt(12)  # the range of uniform numbers, in deviations
    scale, at = 0.02 * uniform, 0
    if kind is GGMLQuantizationType.Q4_0:
        scale /= 16
    elif kind is GGMLQuantizationType.Q8_0:
        scale /= 256
    elif kind is GGMLQuantizationType.Q4_K:
        # The integer minima are the integer scales: weights are then symmetric about 0.
        blocks[..., 8:12] = blocks[..., 4:8]
        blocks[..., 12:16] = (blocks[..., 12:16] & 15) * 17
        scale /= 16 * 64 / math.sqrt(3)
        _set_halves(blocks, 2, 7.5 * scale, zero)
    else:
        scale, at = scale / (64 * 256 / uniform), 208
    _set_halves(blocks, at, scale, zero)


def _set_halves(
    blocks: npt.NDArray[np.uint8], at: int, value: float, zero: npt.NDArray[np.bool_] | None
) -> None:
    """Set the float16 at a byte of each block, to 0 in some rows."""
    blocks[..., at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    if zero is not None:
        blocks[zero, :, at : at + 2] = 0


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
        " these as 1.5b-q4_k_m, 7b-q4_k_m and 30b-a3b-q4_k_m, too, and coder-v2-lite (9 GB).",
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
