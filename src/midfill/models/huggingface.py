"""HuggingFaceCheckpoint: a folder with config.json and safetensors files as a Checkpoint.

The safetensors format (a length, a JSON header, then the data) is read here and not with the
library, because the tensors are to stay memory-mapped and NumPy has no bfloat16.
"""

import hashlib
import json
import math
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from midfill.errors import CheckpointError
from midfill.models.checkpoint import StoredTensor, check_layers, check_tensors, samples
from midfill.models.config import ModelConfig
from midfill.models.families import config_from_huggingface, huggingface_names
from midfill.tokens.huggingface_tokenizer import read_json
from midfill.tokens.tokenizer import Tokenizer

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES: dict[str, tuple[str, np.dtype[np.generic]]] = {
    "F32": ("f32", np.dtype("<f4")),
    "F16": ("f16", np.dtype("<f2")),
    "BF16": ("bf16", np.dtype("<u2")),
}
_IGNORED = re.compile(r".*rotary_emb\.inv_freq")
_NOT_METADATA = ("added_tokens_decoder", "chat_template")


@dataclass(frozen=True)
class _Entry:
    """Where a tensor lies: shard, dtype as safetensors names it, shape, first byte and size."""

    shard: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


class HuggingFaceCheckpoint:
    """A model folder as transformers writes it: one safetensors file or several and an index.

    Attributes:
        path, config: see ``Checkpoint``.
        metadata: what tokenizer_config.json says beside the vocabulary and the chat template,
            and the folder's name as ``general.name``.
    """

    def __init__(self, path: Path) -> None:
        """Open a folder and check that all of the model is there.

        Raises:
            CheckpointError: a file is missing, broken or truncated, or does not fit config.json.
        """
        self.path = path
        self.config: ModelConfig = self._read_config()
        self._maps: dict[Path, mmap.mmap] = {}
        stored = self._read_headers(self._shards())
        check_layers(self.config, len(stored), path)
        names = huggingface_names(self.config)
        canonical = {theirs: name for name, theirs in names.items()}
        self._entries: dict[str, _Entry] = {}
        for theirs, entry in stored.items():
            if theirs in canonical:
                self._entries[canonical[theirs]] = entry
            elif not self._is_spare(theirs):
                raise CheckpointError(
                    f"{entry.shard}: tensor {theirs!r} is no part of a {self.config.family} model "
                    "as configured"
                )
        shapes = {name: entry.shape for name, entry in self._entries.items()}
        check_tensors(self.config, shapes, names, path)
        settings = read_json(path / "tokenizer_config.json", optional=True)
        self.metadata: Mapping[str, object] = {
            "general.name": path.name,
            **{key: value for key, value in settings.items() if key not in _NOT_METADATA},
        }

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded when it is first asked for.

        Raises:
            CheckpointError: tokenizer.json is missing or broken.
        """
        return Tokenizer.from_huggingface_folder(self.path)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of config.json and of each shard's size, time of change, header and samples."""
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        for shard, data in sorted(self._maps.items()):
            digest.update(f"{shard.name} {len(data)} {shard.stat().st_mtime_ns}".encode())
            start = _header_end(data)
            digest.update(data[:start])
            for piece in samples(start, len(data)):
                digest.update(data[piece])
        return digest.hexdigest()

    def names(self) -> list[str]:
        """Canonical names of the tensors it holds."""
        return list(self._entries)

    def tensor(self, name: str) -> StoredTensor:
        """One tensor by canonical name, mapped.

        Raises:
            CheckpointError: there is no such tensor.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        kind, dtype = _DTYPES[entry.dtype]
        flat: npt.NDArray[np.generic] = np.frombuffer(
            self._maps[entry.shard], dtype, math.prod(entry.shape), entry.offset
        )
        return StoredTensor(name, entry.shape, kind, flat.reshape(entry.shape))

    def _read_config(self) -> ModelConfig:
        try:
            return config_from_huggingface(read_json(self.path / "config.json"))
        except CheckpointError as error:
            where = "" if str(error).startswith(str(self.path)) else f"{self.path}: "
            raise CheckpointError(f"{where}{error}") from None

    def _is_spare(self, theirs: str) -> bool:
        """Whether a tensor may be there without being used."""
        tied_head = self.config.tied_embeddings and theirs == "lm_head.weight"
        return tied_head or _IGNORED.fullmatch(theirs) is not None

    def _shards(self) -> list[Path]:
        """The safetensors files."""
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

    def _read_headers(self, shards: list[Path]) -> dict[str, _Entry]:
        """Name in the file -> where it lies, over all shards."""
        entries: dict[str, _Entry] = {}
        for shard in shards:
            self._maps[shard] = _map_file(shard)
            for name, entry in _read_header(shard, self._maps[shard]).items():
                if name in entries:
                    raise CheckpointError(
                        f"{shard}: tensor {name!r} is also in {entries[name].shard.name}"
                    )
                entries[name] = entry
        return entries


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise CheckpointError(f"{path}: can't be read: {error}") from None


def _header_end(data: mmap.mmap) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def _read_header(path: Path, data: mmap.mmap) -> dict[str, _Entry]:
    """The tensors of one safetensors file, each known to lie inside it."""
    start = _header_end(data)
    if len(data) < 8 or start > len(data):
        raise CheckpointError(f"{path}: the file ends inside its header: truncated or broken")
    try:
        header = json.loads(data[8:start])
        described = {name: value for name, value in header.items() if name != "__metadata__"}
        return {
            name: _entry(path, name, value, start, len(data)) for name, value in described.items()
        }
    except (ValueError, AttributeError, RecursionError):
        raise CheckpointError(f"{path}: not a safetensors file: its header is broken") from None


def _entry(path: Path, name: str, value: object, start: int, file_size: int) -> _Entry:
    where = f"{path}: tensor {name!r}"
    try:
        dtype, shape, (begin, end) = (value[key] for key in ("dtype", "shape", "data_offsets"))  # type: ignore[index]
        whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole or not isinstance(dtype, str):
        raise CheckpointError(f"{where} is described wrongly in the file's header")
    if dtype not in _DTYPES:
        raise CheckpointError(f"{where} has type {dtype}; midfill reads {', '.join(_DTYPES)}")
    size = math.prod(shape) * _DTYPES[dtype][1].itemsize
    if end - begin != size:
        raise CheckpointError(f"{where} of shape {shape} takes {size:,} bytes, not {end - begin:,}")
    if start + end > file_size:
        raise CheckpointError(
            f"{where} ends at byte {start + end:,} but the file has only {file_size:,}: it is "
            "truncated; download it again"
        )
    return _Entry(path, dtype, tuple(shape), start + begin, size)
