"""Models of a larger shape with random weights: their text is meaningless, their speed is not.

A model's speed on a CPU depends on its shape and on how its weights are stored, not on their
values. So a comparison of servers on a larger model needs no download: its weights are drawn from
a seed and written as a GGUF file: layers as Q4_0 and the embedding as Q8_0, or Q4_K and Q6_K
matrix by matrix as llama.cpp's Q4_K_M has them; gpt-oss's experts as MXFP4 and all else as Q8_0.
The tokenizer is the default model's, filled up with unused tokens to the shape's vocabulary. Their
embeddings and those of special tokens are zero: with an embedding that is the output head as well,
greedy decoding never takes them.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from benchmarks.shapes.gguf_metadata import add_shape
from benchmarks.shapes.layer_tensors import tensors_of, weights_of
from benchmarks.shapes.random_weights import draw
from benchmarks.shapes.shape import SHAPES, Shape
from midfill.errors import MidfillError, OptionError
from midfill.models.checkpoints.gguf_file import GgufFile
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve
from midfill.system.cache import cache_folder
from midfill.system.files import replacing_file
from midfill.system.machine import format_size

_BYTES_PER_WEIGHT = 0.75
"""Of a file: most are 4.5 bits, those of the embedding up to 8.5."""
_TENSORS_PER_LINE = 32
"""Tensors that are written from one line of progress to the next."""


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
    if shape.layers < shape.least_layers:
        raise OptionError(
            f"{name} has no layer that keeps KV of its own in its first {layers} layers:"
            f" --layers {shape.least_layers}"
        )
    cut = "" if layers is None else f"-{layers}-layers"
    path = cache_folder() / "peers" / f"random-{name}{cut}.gguf"
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        needed = int(weights_of(shape) * _BYTES_PER_WEIGHT)
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
    add_shape(writer, shape)
    ordinary = _add_tokenizer(writer, tokens_from, shape.vocab)
    tensors = tensors_of(shape)
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
