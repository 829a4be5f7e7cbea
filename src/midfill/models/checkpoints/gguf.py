"""GgufCheckpoint: a GGUF file as a Checkpoint, under canonical names and in canonical order."""

import hashlib
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from midfill.errors import CheckpointError
from midfill.models.checkpoints.checkpoint import check_tensors, digest_tensors, samples
from midfill.models.checkpoints.gguf_file import GgufFile
from midfill.models.config import ModelConfig
from midfill.models.families import FAMILIES, config_from_gguf
from midfill.models.tokens.gguf_tokenizer import build_tokenizer
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.stored_tensor import StoredTensor

_OUTER_NAMES = {"token_embd": "embed", "output_norm": "final_norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "post_attention_norm": "attn_post_norm",
    "ffn_norm": "mlp_norm",
    "post_ffw_norm": "mlp_post_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<leaf>weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_IGNORED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")

_MAX_METADATA_LIST = 1024


class GgufCheckpoint:
    """A GGUF file. Tensors are memory-mapped and dequantised only on request.

    For some families, converters store the rows of q and k with the two halves of the rotary
    embedding interleaved. They are returned in NEOX order. Only whole rows move, so quantised
    blocks stay as they are.

    Attributes:
        path, config: see ``Checkpoint``.
        metadata: the file's own keys, without long lists (the vocabulary).
    """

    def __init__(self, path: Path) -> None:
        """Open a file, and check that the model is complete.

        Raises:
            CheckpointError: it is broken, truncated or of an unsupported kind.
        """
        self.path = path
        self._file = GgufFile(path)
        self._check_whole()
        self._stored_names = self._canonical_names()
        shapes = {
            name: self._file.tensors[stored].shape for name, stored in self._stored_names.items()
        }
        self.config: ModelConfig = self._read_config(shapes)
        check_tensors(self.config, shapes, self._stored_names, path)
        self._check_types()
        self.metadata: Mapping[str, object] = {
            key: value
            for key, value in self._file.metadata.items()
            if not (isinstance(value, list) and len(value) > _MAX_METADATA_LIST)
        }

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, built at first use.

        Raises:
            CheckpointError: the file holds none, or one of an unsupported kind.
        """
        try:
            return build_tokenizer(self._file.metadata)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    @cached_property
    def fingerprint(self) -> str:
        """Digest of size, modification time, header and samples spread over the data."""
        file, digest = self._file, hashlib.sha256()
        digest.update(f"{len(file)} {self.path.stat().st_mtime_ns}".encode())
        digest.update(file.bytes_at(slice(0, file.header_bytes)))
        for sample in samples(file.header_bytes, len(file)):
            digest.update(file.bytes_at(sample))
        return digest.hexdigest()

    @cached_property
    def content_digest(self) -> str:
        """See ``Checkpoint.content_digest``; rows are hashed in the file's own order."""
        entries = {name: self._file.tensors[stored] for name, stored in self._stored_names.items()}
        return digest_tensors(
            StoredTensor(name, entry.shape, entry.type.name.lower(), self._file.data(entry.name))
            for name, entry in entries.items()
        )

    def names(self) -> list[str]:
        """Return the canonical names of the tensors it holds."""
        return list(self._stored_names)

    def tensor(self, name: str) -> StoredTensor:
        """Return one tensor by canonical name; q and k are copied where their rows have to move.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if name not in self._stored_names:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        stored = self._stored_names[name]
        entry, data = self._file.tensors[stored], self._file.data(stored)
        if FAMILIES[self.config.family].gguf_interleaved_rotary:
            module = name.split(".")[-2]
            heads = {"q": self.config.query_heads, "k": self.config.kv_heads}
            if module in heads:
                data = _deinterleave(data, heads[module])
        return StoredTensor(name, entry.shape, entry.type.name.lower(), data)

    def _read_config(self, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
        factors: npt.NDArray[np.generic] = np.empty(0, np.float32)
        if _ROPE_FACTORS in self._file.tensors:
            if self._file.tensors[_ROPE_FACTORS].type is not GGMLQuantizationType.F32:
                raise CheckpointError(f"{self.path}: tensor {_ROPE_FACTORS!r} must be F32")
            factors = self._file.data(_ROPE_FACTORS).reshape(-1)
        try:
            return config_from_gguf(self._file.metadata, shapes, factors.tolist())
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def _canonical_names(self) -> dict[str, str]:
        """Return canonical name -> name in the file."""
        names = {}
        for stored in self._file.tensors:
            name = _canonical_name(stored)
            if name is not None:
                names[name] = stored
            elif not _IGNORED.fullmatch(stored):
                raise CheckpointError(
                    f"{self.path}: tensor {stored!r} is of a kind of model midfill does not know"
                )
        return names

    def _check_whole(self) -> None:
        parts = self._file.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise CheckpointError(
                f"{self.path}: is one of {parts} parts; merge them first "
                "(llama.cpp: llama-gguf-split --merge)"
            )

    def _check_types(self) -> None:
        """Check that every type used can be dequantised, by trying it on one row."""
        types = {self._file.tensors[stored].type: stored for stored in self._stored_names.values()}
        for kind, stored in types.items():
            row = self._file.data(stored)[:1]
            try:
                if row.dtype == np.uint8:
                    dequantize(row, kind)
            except NotImplementedError:
                raise CheckpointError(
                    f"{self.path}: tensor {stored!r} has type {kind.name}, which can't be "
                    "dequantised"
                ) from None


def _canonical_name(stored: str) -> str | None:
    """Return the canonical name for a GGUF one, None for tensors that are no model weights."""
    parts = _NAME.fullmatch(stored)
    if parts is None:
        return None
    layer, module, leaf = parts["layer"], parts["module"], parts["leaf"]
    known = (_OUTER_NAMES if layer is None else _LAYER_NAMES).get(module)
    if known is None:
        return None
    return f"{known}.{leaf}" if layer is None else f"layers.{int(layer)}.{known}.{leaf}"


def _deinterleave(data: npt.NDArray[np.generic], heads: int) -> npt.NDArray[np.generic]:
    """Reorder rows (h, pair, half) to (h, half, pair): GGML's NORM rotary order to NEOX order."""
    split = data.reshape(heads, -1, 2, *data.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(data.shape)
