"""Hugging Face folders: config.json and safetensors files as a Checkpoint."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from midfill.errors import CheckpointError
from midfill.models.checkpoints.checkpoint import check_layers, check_tensors, digest_tensors
from midfill.models.checkpoints.fused_projections import in_key_order, split_fused
from midfill.models.checkpoints.gathered_rows import GatheredEntry, gather
from midfill.models.checkpoints.interleaved_experts import ExpertEntry, split_interleaved
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
_PREDICTOR = re.compile(r"mtp\..*")
"""Layers that predict further tokens."""
_SENSES = re.compile(r"model\.(visual|vision_tower|audio_tower|embed_vision|embed_audio)\..*")
"""Parts of a model that see images or hear."""
_KEYS = re.compile(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.(weight|bias)")
"""What computes K and V, which files have of layers that share them, too."""
_TEXT_PART, _TEXT = "model.language_model.", "model."
"""Beginnings of names in a model that sees images, too, and in one that doesn't."""
_NOT_METADATA = ("added_tokens_decoder", "chat_template")


_FUSED = re.compile(r"(?P<experts>.*\.experts)\.(?P<part>gate_up_proj|down_proj)")
_FUSED_MLP = re.compile(r"(?P<mlp>.*\.shared_mlp)\.input_linear\.weight")
_CONVOLUTION = re.compile(r".*\.(mamba|linear_attn)\.conv1d\.weight")
_Entry = SafetensorsEntry | ExpertEntry | GatheredEntry


def split_stacked(entries: Mapping[str, SafetensorsEntry]) -> dict[str, SafetensorsEntry]:
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
        stored = self._split(self._read_headers(self._shards()))
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
        """Return one tensor by canonical name, memory-mapped but for a few.

        Norms that are stored shifted are copied, and queries and keys of which a part is rotated.

        Raises:
            CheckpointError: there is no such tensor.
        """
        entry = self._entry(name)
        if isinstance(entry, ExpertEntry):
            return entry.tensor(name, self._data_of)
        if isinstance(entry, GatheredEntry):
            stored = entry.tensor(name, self._data_of)
        else:
            stored = StoredTensor(name, entry.shape, entry.kind, self._data_of(entry))
        rotated, heads = self.config.rotated, self.config.heads_of(name)
        if rotated is not None and heads:
            stored = replace(stored, data=in_key_order(stored.data, heads, rotated))
        offset = FAMILIES[self.config.family].norm_offset
        if not offset or not name.endswith("norm.weight") or name.endswith("ssm_norm.weight"):
            return stored
        return replace(stored, kind="f32", data=stored.to_float32() + np.float32(offset))

    def _entry(self, name: str) -> _Entry:
        theirs = self._names.get(name)
        if theirs is None:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        return self._entries[theirs]

    def _data_of(self, entry: SafetensorsEntry) -> npt.NDArray[np.generic]:
        return self._files[entry.file].data_of(entry)

    def _split(self, entries: Mapping[str, SafetensorsEntry]) -> Mapping[str, _Entry]:
        """Give tensors entries of their own where a file has several in one.

        Raises:
            CheckpointError: a tensor of bytes is none of an expert's.
        """
        family = FAMILIES[self.config.family]
        if family.multimodal_type:
            entries = {
                re.sub(rf"^{re.escape(_TEXT_PART)}", _TEXT, name): entry
                for name, entry in entries.items()
            }
        split: dict[str, _Entry]
        if family.interleaved_experts:
            split = {**split_interleaved(entries)}
        elif family.fused_projections:
            split = {**split_fused(entries, self.config)}
        else:
            split = {**gather(split_stacked(entries), self.config, family.huggingface_modules)}
        for name, entry in split.items():
            if entry.kind == "u8" and isinstance(entry, SafetensorsEntry):
                raise CheckpointError(
                    f"{entry.file}: tensor {name!r} has type U8, which midfill reads of experts "
                    "only; use the unquantised model or a GGUF file"
                )
        return split

    def _read_config(self) -> ModelConfig:
        try:
            return config_from_huggingface(read_json(self.path / "config.json"))
        except CheckpointError as error:
            where = "" if str(error).startswith(str(self.path)) else f"{self.path}: "
            raise CheckpointError(f"{where}{error}") from None

    def _is_spare(self, theirs: str) -> bool:
        """Return whether a tensor may be present without being used."""
        tied_head = self.config.tied_embeddings and theirs == "lm_head.weight"
        family, ignored = FAMILIES[self.config.family], [_IGNORED]
        if family.skips_predictors:
            ignored.append(_PREDICTOR)
        if family.multimodal_type:
            ignored.append(_SENSES)
        keys = _KEYS.fullmatch(theirs)
        if keys is not None and self.config.shares_kv(int(keys[1])):
            return True
        return tied_head or any(pattern.fullmatch(theirs) for pattern in ignored)

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
        with_bytes = FAMILIES[self.config.family].interleaved_experts
        for shard in shards:
            self._files[shard] = SafetensorsFile(shard, with_bytes=with_bytes)
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
