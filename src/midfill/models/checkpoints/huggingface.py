"""HuggingFaceCheckpoint: a folder with config.json and safetensors files as a Checkpoint."""

import hashlib
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from midfill.errors import CheckpointError
from midfill.models.checkpoints.checkpoint import (
    check_layers,
    check_tensors,
    digest_tensors,
    samples,
)
from midfill.models.checkpoints.model_record import folder_metadata
from midfill.models.checkpoints.safetensors_file import SafetensorsEntry, SafetensorsFile
from midfill.models.config import ModelConfig
from midfill.models.families import FAMILIES, config_from_huggingface, huggingface_names
from midfill.models.tokens.huggingface_tokenizer import load_folder, read_json
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.stored_tensor import StoredTensor

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_IGNORED = re.compile(r".*rotary_emb\.inv_freq")
_NOT_METADATA = ("added_tokens_decoder", "chat_template")


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
        stored = self._read_headers(self._shards())
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
            digest.update(f"{shard.name} {len(file)} {shard.stat().st_mtime_ns}".encode())
            digest.update(file.bytes_at(slice(0, file.header_bytes)))
            for sample in samples(file.header_bytes, len(file)):
                digest.update(file.bytes_at(sample))
        return digest.hexdigest()

    @cached_property
    def content_digest(self) -> str:
        """See ``Checkpoint.content_digest``."""
        return digest_tensors(self.tensor(name) for name in self.names())

    def names(self) -> list[str]:
        """Return the canonical names of the tensors it holds."""
        return list(self._names)

    def tensor(self, name: str) -> StoredTensor:
        """Return one tensor by canonical name, memory-mapped but for norms that are stored shifted.

        Raises:
            CheckpointError: there is no such tensor.
        """
        theirs = self._names.get(name)
        if theirs is None:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        entry = self._entries[theirs]
        stored = StoredTensor(name, entry.shape, entry.kind, self._files[entry.file].data(theirs))
        offset = FAMILIES[self.config.family].norm_offset
        if not offset or not name.endswith("norm.weight"):
            return stored
        return StoredTensor(name, entry.shape, "f32", stored.to_float32() + np.float32(offset))

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
                entries[name] = entry
        return entries
