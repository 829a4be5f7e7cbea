"""Hugging Face folders: safetensors files, and a folder with config.json as a Checkpoint.

The format of safetensors files (a length, a JSON header, then the data) is read here instead of
with the library, so that tensors stay memory-mapped: the library's ``safe_open`` copies each one,
and gives its place in the file to nobody. NumPy also has no bfloat16.
"""

import hashlib
import json
import math
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from midfill.errors import CheckpointError
from midfill.models.checkpoints.checkpoint import (
    MappedFile,
    check_layers,
    check_tensors,
    digest_tensors,
)
from midfill.models.checkpoints.model_record import folder_metadata
from midfill.models.config import ModelConfig
from midfill.models.families import FAMILIES, config_from_huggingface, huggingface_names
from midfill.models.tokens.huggingface_tokenizer import load_folder, read_json
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.stored_tensor import StoredTensor

_DTYPES: dict[str, tuple[str, np.dtype[np.generic]]] = {
    "F32": ("f32", np.dtype("<f4")),
    "F16": ("f16", np.dtype("<f2")),
    "BF16": ("bf16", np.dtype("<u2")),
    "F8_E4M3": ("f8_e4m3", np.dtype("u1")),
}


@dataclass(frozen=True)
class SafetensorsEntry:
    """Description of a tensor and its place in the file.

    Attributes:
        file: the file that holds it.
        kind: "f32", "f16", "bf16" or "f8_e4m3".
        shape: its shape.
        offset: first byte, counted from the file's start.
        size: length in bytes.
    """

    file: Path
    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int


class SafetensorsFile(MappedFile):
    """An opened safetensors file.

    Attributes:
        entries: name -> description; all of them are known to lie inside the file.
    """

    def __init__(self, path: Path) -> None:
        """Open and check a file.

        Raises:
            CheckpointError: it can't be read, is no safetensors file, or is truncated or broken.
        """
        super().__init__(path, _map_file(path))
        self.header_bytes = 8 + int.from_bytes(self._map[:8], "little")
        self.entries: Mapping[str, SafetensorsEntry] = self._read_header()

    def data(self, name: str) -> npt.NDArray[np.generic]:
        """Return a tensor's data in its shape, read-only and memory-mapped.

        bfloat16 is returned as uint16 bit patterns, float8 as uint8 ones.
        """
        return self.data_of(self.entries[name])

    def data_of(self, entry: SafetensorsEntry) -> npt.NDArray[np.generic]:
        """Return what an entry of this file, or a part of one, describes; see ``data``."""
        dtype = next(dtype for kind, dtype in _DTYPES.values() if kind == entry.kind)
        flat: npt.NDArray[np.generic] = np.frombuffer(
            self._map, dtype, math.prod(entry.shape), entry.offset
        )
        return flat.reshape(entry.shape)

    def _read_header(self) -> dict[str, SafetensorsEntry]:
        if len(self) < 8 or self.header_bytes > len(self):
            raise CheckpointError(
                f"{self.path}: the file ends inside its header: truncated or broken"
            )
        try:
            header = json.loads(self._map[8 : self.header_bytes])
            described = {name: value for name, value in header.items() if name != "__metadata__"}
        except (ValueError, AttributeError, RecursionError):
            raise CheckpointError(
                f"{self.path}: not a safetensors file: its header is broken"
            ) from None
        return {name: self._entry(name, value) for name, value in described.items()}

    def _entry(self, name: str, value: Any) -> SafetensorsEntry:
        where = f"{self.path}: tensor {name!r}"
        try:
            dtype, shape, (begin, end) = (value[key] for key in ("dtype", "shape", "data_offsets"))
            whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        except (TypeError, KeyError, ValueError):
            whole = False
        if not whole or not isinstance(dtype, str):
            raise CheckpointError(f"{where} is described wrongly in the file's header")
        if dtype not in _DTYPES:
            raise CheckpointError(f"{where} has type {dtype}; midfill reads {', '.join(_DTYPES)}")
        kind, numbers = _DTYPES[dtype]
        size = math.prod(shape) * numbers.itemsize
        if end - begin != size:
            raise CheckpointError(
                f"{where} of shape {shape} takes {size:,} bytes, not {end - begin:,}"
            )
        if self.header_bytes + end > len(self):
            raise CheckpointError(
                f"{where} ends at byte {self.header_bytes + end:,} but the file has only "
                f"{len(self):,}: it is truncated; download it again"
            )
        return SafetensorsEntry(self.path, kind, tuple(shape), self.header_bytes + begin, size)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise CheckpointError(f"{path}: can't be read: {error}") from None


_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_IGNORED = re.compile(r".*rotary_emb\.inv_freq")
_NOT_METADATA = ("added_tokens_decoder", "chat_template")


_FUSED = re.compile(r"(?P<experts>.*\.experts)\.(?P<part>gate_up_proj|down_proj)")
_FUSED_MLP = re.compile(r"(?P<mlp>.*\.shared_mlp)\.input_linear\.weight")
_CONVOLUTION = re.compile(r".*\.mamba\.conv1d\.weight")


def split_fused(entries: Mapping[str, SafetensorsEntry]) -> dict[str, SafetensorsEntry]:
    """Give each matrix an entry of its own, where a file has several in one.

    transformers holds those of all experts so, gate's rows before up's: [experts, 2 * ffn, hidden]
    and [experts, hidden, ffn]. It writes them one by one, unless it is asked not to. An MLP that
    stands for experts that all tokens share (Granite) is written as [2 * ffn, hidden]. The weights
    of a convolution by channel, [channels, 1, width], are a matrix here.
    """
    split = {}
    for name, entry in entries.items():
        mlp = _FUSED_MLP.fullmatch(name)
        if mlp is not None and len(entry.shape) == 2 and entry.shape[0] % 2 == 0:
            half = replace(entry, shape=(entry.shape[0] // 2, entry.shape[1]), size=entry.size // 2)
            split[f"{mlp['mlp']}.gate_proj.weight"] = half
            split[f"{mlp['mlp']}.up_proj.weight"] = replace(half, offset=half.offset + half.size)
            continue
        if _CONVOLUTION.fullmatch(name) and len(entry.shape) == 3 and entry.shape[1] == 1:
            split[name] = replace(entry, shape=(entry.shape[0], entry.shape[2]))
            continue
        fused = _FUSED.fullmatch(name)
        if fused is None or len(entry.shape) != 3 or 0 in entry.shape:
            split[name] = entry
            continue
        parts = ("down",) if fused["part"] == "down_proj" else ("gate", "up")
        experts, rows, inputs = entry.shape
        size = entry.size // (experts * len(parts))
        for number in range(experts * len(parts)):
            expert, part = number // len(parts), parts[number % len(parts)]
            split[f"{fused['experts']}.{expert}.{part}_proj.weight"] = replace(
                entry, shape=(rows // len(parts), inputs), offset=entry.offset + number * size,
                size=size,
            )  # fmt: skip
    return split


class HuggingFaceCheckpoint:
    """A model folder as transformers writes it: one safetensors file, or several with an index.

    Attributes:
        path, config: see ``Checkpoint``.
        metadata: the content of tokenizer_config.json without vocabulary and chat template, the
            folder's name as ``general.name``, and what ``model_record`` finds in its midfill.json.
    """

    def __init__(self, path: Path) -> None:
        """Open a folder, and check that the model is complete.

        Raises:
            CheckpointError: a file is missing, broken or truncated, or does not fit config.json.
        """
        self.path = path
        self.config: ModelConfig = self._read_config()
        self._files: dict[Path, SafetensorsFile] = {}
        stored = split_fused(self._read_headers(self._shards()))
        check_layers(self.config, len(stored), path)
        names = huggingface_names(self.config)
        canonical = {theirs: name for name, theirs in names.items()}
        self._names: dict[str, str] = {}
        for theirs, entry in stored.items():
            if theirs in canonical:
                self._names[canonical[theirs]] = theirs
            elif not self._is_spare(theirs):
                raise CheckpointError(
                    f"{entry.file}: tensor {theirs!r} is no part of a {self.config.family} model "
                    "as configured"
                )
        self._entries = stored
        shapes = {name: stored[theirs].shape for name, theirs in self._names.items()}
        check_tensors(self.config, shapes, names, path)
        settings = read_json(path / "tokenizer_config.json", optional=True)
        self.metadata: Mapping[str, object] = {
            "general.name": path.name,
            **{key: value for key, value in settings.items() if key not in _NOT_METADATA},
            **folder_metadata(path),
        }

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded at first use.

        Raises:
            CheckpointError: tokenizer.json is missing or broken.
        """
        return load_folder(self.path)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of config.json and of each shard's size, modification time, header and samples."""
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        for shard, file in sorted(self._files.items()):
            digest.update(f"{shard.name} ".encode() + file.fingerprint())
        return digest.hexdigest()

    @cached_property
    def content_digest(self) -> str:
        """See ``Checkpoint.content_digest``."""
        return digest_tensors(self.tensor(name) for name in self.names())

    def names(self) -> list[str]:
        """Return the canonical names of the tensors it holds."""
        return list(self._names)

    def kind(self, name: str) -> str:
        """Return the kind of one tensor."""
        return self.tensor(name).kind

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return self._entry(name).shape

    def tensor(self, name: str) -> StoredTensor:
        """Return one tensor by canonical name, memory-mapped but for norms that are stored shifted.

        Raises:
            CheckpointError: there is no such tensor.
        """
        entry = self._entry(name)
        stored = StoredTensor(name, entry.shape, entry.kind, self._files[entry.file].data_of(entry))
        offset = FAMILIES[self.config.family].norm_offset
        if not offset or not name.endswith("norm.weight"):
            return stored
        return StoredTensor(name, entry.shape, "f32", stored.to_float32() + np.float32(offset))

    def _entry(self, name: str) -> SafetensorsEntry:
        theirs = self._names.get(name)
        if theirs is None:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        return self._entries[theirs]

    def _read_config(self) -> ModelConfig:
        try:
            return config_from_huggingface(read_json(self.path / "config.json"))
        except CheckpointError as error:
            where = "" if str(error).startswith(str(self.path)) else f"{self.path}: "
            raise CheckpointError(f"{where}{error}") from None

    def _is_spare(self, theirs: str) -> bool:
        """Return whether a tensor may be present without being used."""
        tied_head = self.config.tied_embeddings and theirs == "lm_head.weight"
        return tied_head or _IGNORED.fullmatch(theirs) is not None

    def _shards(self) -> list[Path]:
        """Return the safetensors files."""
        if (self.path / _SINGLE).is_file():
            return [self.path / _SINGLE]
        if (self.path / _INDEX).is_file():
            return self._indexed_shards()
        if any(self.path.glob("*.bin")) or any(self.path.glob("*.pth")):
            raise CheckpointError(
                f"{self.path}: holds PyTorch pickles only, which midfill does not load because "
                "they can run code; save the model as safetensors"
            )
        raise CheckpointError(f"{self.path}: holds neither {_SINGLE} nor {_INDEX}")

    def _indexed_shards(self) -> list[Path]:
        index = self.path / _INDEX
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index}: 'weight_map' is missing")
        shards: dict[Path, None] = {}
        for name in weight_map.values():
            if not isinstance(name, str) or not name or Path(name).name != name:
                raise CheckpointError(f"{index}: {name!r} is not the name of a file")
            shards[self.path / name] = None
        for shard in shards:
            if not shard.is_file():
                raise CheckpointError(f"{shard}: the file is missing; {_INDEX} lists it")
        return list(shards)

    def _read_headers(self, shards: list[Path]) -> dict[str, SafetensorsEntry]:
        """Return name in the file -> its entry, over all shards."""
        entries: dict[str, SafetensorsEntry] = {}
        for shard in shards:
            self._files[shard] = SafetensorsFile(shard)
            for name, entry in self._files[shard].entries.items():
                if name in entries:
                    raise CheckpointError(
                        f"{shard}: tensor {name!r} is also in {entries[name].file.name}"
                    )
                if entry.kind == "f8_e4m3":
                    raise CheckpointError(
                        f"{shard}: tensor {name!r} is in float8, which midfill reads in adapters "
                        "only; convert the model to bfloat16"
                    )
                entries[name] = entry
        return entries
