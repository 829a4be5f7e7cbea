"""Checkpoint: a model on disk seen through canonical tensor names, whatever its file format.

Canonical names (weights are [out_features, in_features], rotary halves in NEOX order):

    embed.weight  final_norm.weight  final_norm.bias  lm_head.weight (absent when tied)
    layers.{i}.attn_norm.weight|bias    layers.{i}.mlp_norm.weight|bias
    layers.{i}.{q,k,v,o}.weight|bias    layers.{i}.{q_norm,k_norm}.weight
    layers.{i}.{gate,up,down}.weight|bias   (no gate when the MLP is not gated)
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from midfill.errors import CheckpointError, ModelNotFoundError
from midfill.models.config import ModelConfig
from midfill.models.tensors import tensor_shapes
from midfill.tokens.tokenizer import Tokenizer

ADAPTER_KEY = "midfill.adapter"
"""Metadata: name of the adapter that was merged into a model when it was opened."""

FRAGMENTS_KEY = "midfill.fragments"
"""Metadata: true where a model was trained on text tokenised in fragments, as EFIM cuts it."""

_SAMPLES = 64
_SAMPLE_BYTES = 4096
_TENSOR_SAMPLES = 16
_TENSOR_SAMPLE_BYTES = 512


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in the file, not yet dequantised.

    Attributes:
        name: canonical name.
        shape: logical shape, e.g. (out_features, in_features).
        kind: lower-case GGML type name: "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1",
            "q8_0", "q2_k" ... "q6_k", ...
        data: "f32": float32 of ``shape``; "f16": float16; "bf16": uint16 bit patterns of
            ``shape``; quantised kinds: uint8 [rows, bytes a row], rows = prod(shape[:-1]),
            each row a sequence of GGML blocks. May be a read-only memory map.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    data: npt.NDArray[np.generic]

    def to_float32(self) -> npt.NDArray[np.float32]:
        """Dequantise; returns float32 of ``shape`` (the data itself where it is float32)."""
        if self.kind == "f32":
            return self.data.astype(np.float32, copy=False)
        if self.kind == "f16":
            return self.data.astype(np.float32)
        if self.kind == "bf16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        values = dequantize(self.data, GGMLQuantizationType[self.kind.upper()])
        return np.asarray(values, np.float32).reshape(self.shape)


class Checkpoint(Protocol):
    """An opened model: its configuration, tokenizer and tensors.

    Attributes:
        path: file or folder it was opened from.
        config: the architecture.
        metadata: what the checkpoint says of itself beside that (FIM token ids, chat template,
            name, licence), string to plain value.
    """

    path: Path
    config: ModelConfig
    metadata: Mapping[str, object]

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's own, built when it is first asked for.

        Raises:
            CheckpointError: it is missing, broken or of a kind midfill does not know.
        """
        ...

    @property
    def fingerprint(self) -> str:
        """Hex digest that changes with the content, cheap to take; keys caches of derived data."""
        ...

    @property
    def content_digest(self) -> str:
        """Hex sha256 of what the model is: the same wherever and whenever it was stored.

        Names, shapes, kinds and samples of all tensors go into it, see ``digest_tensors``, so a
        fine-tuned or otherwise quantised model has another one. An adapter names its base by it.
        """
        ...

    def names(self) -> list[str]:
        """Canonical names of the tensors it holds."""
        ...

    def tensor(self, name: str) -> StoredTensor:
        """One tensor by canonical name.

        Raises:
            CheckpointError: it is missing, truncated or of an unknown type.
        """
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file, a Hugging Face folder, or a folder with one GGUF file in it.

    Raises:
        ModelNotFoundError: there is nothing at the path that could be a model.
        CheckpointError: the model is broken, truncated or of a kind midfill can't run.
    """
    # The formats import this module.
    from midfill.models.gguf import GgufCheckpoint
    from midfill.models.huggingface import HuggingFaceCheckpoint

    if path.is_file():
        if path.suffix == ".safetensors":
            raise CheckpointError(f"{path}: name the folder it lies in, with its config.json")
        return GgufCheckpoint(path)
    if not path.is_dir():
        raise ModelNotFoundError(f"{path}: no such file or folder")
    if (path / "config.json").is_file():
        return HuggingFaceCheckpoint(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return GgufCheckpoint(files[0])
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelNotFoundError(f"{path}: holds several models, name one of them: {names}")
    raise ModelNotFoundError(f"{path}: holds neither a config.json nor a .gguf file")


def samples(start: int, stop: int) -> list[slice]:
    """Slices from all over a file's data, both ends included, for fingerprints of big files.

    Args:
        start, stop: bytes of the file where the data begins and ends.
    """
    last = max(stop - _SAMPLE_BYTES, start)
    starts = [start + (last - start) * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
    return [slice(at, min(at + _SAMPLE_BYTES, stop)) for at in starts]


def digest_tensors(tensors: Iterable[StoredTensor]) -> str:
    """Hex sha256 over tensors in order of their names: name, kind, shape and samples of the data.

    Small tensors go in whole, of others 16 stretches of 512 bytes from all over the data.
    """
    digest = hashlib.sha256()
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        digest.update(f"{tensor.name} {tensor.kind} {list(tensor.shape)}\n".encode())
        data = tensor.data.reshape(-1).view(np.uint8)
        last = len(data) - _TENSOR_SAMPLE_BYTES
        if len(data) <= _TENSOR_SAMPLES * _TENSOR_SAMPLE_BYTES:
            digest.update(data.tobytes())
            continue
        for i in range(_TENSOR_SAMPLES):
            at = last * i // (_TENSOR_SAMPLES - 1)
            digest.update(data[at : at + _TENSOR_SAMPLE_BYTES].tobytes())
    return digest.hexdigest()


def check_layers(config: ModelConfig, tensors: int, source: object) -> None:
    """Check that there are enough tensors for the layers, before all their names are made.

    Raises:
        CheckpointError: there are fewer tensors than layers.
    """
    if tensors < config.layers:
        raise CheckpointError(
            f"{source}: {tensors} tensors are too few for the {config.layers} layers that the "
            "model's configuration asks for"
        )


def check_tensors(
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    stored_names: Mapping[str, str],
    source: object,
) -> None:
    """Check that a checkpoint holds exactly the tensors its configuration calls for.

    Args:
        config: the architecture.
        shapes: canonical name -> shape of what is there.
        stored_names: canonical name -> name in the files, for the errors, where it is known.
        source: what errors call the checkpoint.

    Raises:
        CheckpointError: a tensor is missing, of another shape or unknown; names the first.
    """
    check_layers(config, len(shapes), source)
    expected = tensor_shapes(config)
    for name, shape in expected.items():
        shown = stored_names.get(name, name)
        if name not in shapes:
            raise CheckpointError(f"{source}: tensor {shown!r} is missing")
        if shapes[name] != shape:
            raise CheckpointError(
                f"{source}: tensor {shown!r} has shape {list(shapes[name])}, the model's "
                f"configuration asks for {list(shape)}"
            )
    for name in shapes:
        if name not in expected:
            raise CheckpointError(
                f"{source}: tensor {stored_names.get(name, name)!r} is no part of a "
                f"{config.family} model as configured"
            )
