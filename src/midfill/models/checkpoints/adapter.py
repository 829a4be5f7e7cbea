"""Adapter: a LoRA adapter's folder, read and checked against its base model.

LoRA (Hu et al., 2021, "LoRA: Low-Rank Adaptation of Large Language Models") adds scale * B @ A to a
weight. The PEFT library writes adapter_config.json (see ``lora_config``) and
adapter_model.safetensors. midfill may add midfill.json (see ``adapter_record``).
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from midfill.arrays import Float32Array
from midfill.errors import CheckpointError, ModelNotFoundError
from midfill.models.checkpoints.adapter_record import AdapterRecord, read_record
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.lora_config import LoraConfig
from midfill.models.checkpoints.lora_update import LoraUpdate
from midfill.models.checkpoints.model_record import RECORD_FILE
from midfill.models.checkpoints.safetensors_file import SafetensorsFile
from midfill.models.config import ModelConfig
from midfill.models.families import huggingface_names
from midfill.models.tensor_shapes import tensor_shapes
from midfill.stored_tensor import StoredTensor

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_KEY = re.compile(
    r"base_model\.model\.(?P<module>.+?)\."
    r"(?:lora_(?P<side>[AB])\.weight|(?:token_adapter\.)?trainable_tokens_delta)"
)


@dataclass(frozen=True)
class ReplacedRows:
    """New rows for some tokens of an embedding or LM head.

    Attributes:
        token_ids: the rows' tokens, each once.
        values: float32 [len(token_ids), hidden].
    """

    token_ids: tuple[int, ...]
    values: Float32Array


@dataclass(frozen=True)
class Adapter:
    """An adapter that is known to fit its base.

    Attributes:
        path: its folder.
        updates: canonical tensor name -> the update that is added to it.
        rows: canonical tensor name -> rows of it that are replaced.
        record: the content of its midfill.json.
        fingerprint: hex digest of everything that changes weights.
    """

    path: Path
    updates: Mapping[str, LoraUpdate]
    rows: Mapping[str, ReplacedRows]
    record: AdapterRecord
    fingerprint: str

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name


def load_adapter(path: Path, base: Checkpoint) -> Adapter:
    """Read an adapter's folder, and check it against a base.

    Args:
        path: the folder.
        base: only its configuration, tokenizer and digest are read.

    Raises:
        ModelNotFoundError: there is no adapter.
        CheckpointError: it is broken, of a kind midfill can't merge, or for another base.
    """
    if not path.is_dir():
        raise ModelNotFoundError(f"{path}: no such folder; --adapter names the folder of a LoRA")
    if not (path / CONFIG_FILE).is_file():
        raise ModelNotFoundError(f"{path}: holds no {CONFIG_FILE}, so it is no adapter")
    if not (path / WEIGHTS_FILE).is_file():
        raise CheckpointError(f"{path}: holds no {WEIGHTS_FILE}; save the adapter as safetensors")
    config = LoraConfig(path / CONFIG_FILE)
    record = read_record(path / RECORD_FILE, base)
    weights = SafetensorsFile(path / WEIGHTS_FILE)
    updates, rows = _TensorReader(config, weights, base.config).read()
    digest = hashlib.sha256(config.path.read_bytes())
    digest.update(weights.bytes_at(slice(0, len(weights))))
    return Adapter(path, updates, rows, record, digest.hexdigest())


class _TensorReader:
    """Sorts the tensors of adapter_model.safetensors by the tensors of the base they change."""

    def __init__(self, config: LoraConfig, weights: SafetensorsFile, model: ModelConfig) -> None:
        self._config = config
        self._weights = weights
        self._model = model
        self._shapes = tensor_shapes(model)
        self._modules = {
            theirs.removesuffix(".weight"): name
            for name, theirs in huggingface_names(model).items()
            if theirs.endswith(".weight") and len(self._shapes[name]) == 2
        }

    def read(self) -> tuple[dict[str, LoraUpdate], dict[str, ReplacedRows]]:
        """Return updates and replaced rows by canonical tensor name.

        Raises:
            CheckpointError: a tensor is unknown, has no counterpart, or does not fit.
        """
        sides: dict[str, dict[str, str]] = {}
        rows: dict[str, ReplacedRows] = {}
        for key in self._weights.entries:
            match = _KEY.fullmatch(key)
            if match is None:
                raise CheckpointError(
                    f"{self._weights.path}: tensor {key!r} is no part of a plain LoRA on linear "
                    "layers, which is what midfill merges"
                )
            module = match["module"]
            self._check_module(key, module)
            if match["side"] is None:
                rows[self._modules[module]] = self._rows(key, module)
            else:
                sides.setdefault(module, {})[match["side"]] = key
        updates = {
            self._modules[module]: self._update(module, keys) for module, keys in sides.items()
        }
        return updates, rows

    def _check_module(self, key: str, module: str) -> None:
        if module in self._modules:
            return
        layer = re.match(r"model\.layers\.(\d+)\.", module)
        if layer is not None and int(layer[1]) >= self._model.layers:
            reason = f"the base has {self._model.layers} layers"
        elif module == "lm_head" and self._model.tied_embeddings:
            reason = "the base's LM head is its embedding"
        else:
            reason = f"a {self._model.family} model has no such layer"
        raise CheckpointError(f"{self._weights.path}: tensor {key!r} fits nothing: {reason}")

    def _update(self, module: str, keys: Mapping[str, str]) -> LoraUpdate:
        if len(keys) < 2:
            (present,) = keys.values()
            missing = "B" if "A" in keys else "A"
            raise CheckpointError(
                f"{self._weights.path}: {present!r} has no lora_{missing} beside it"
            )
        name = self._modules[module]
        if name == "embed.weight":
            raise CheckpointError(
                f"{self._weights.path}: {keys['A']!r} is a LoRA on the embedding, which is not "
                "supported; use trainable_token_indices"
            )
        outputs, inputs = self._shapes[name]
        rank = self._config.rank(module)
        down = self._array(keys["A"], (rank, inputs))
        up = self._array(keys["B"], (outputs, rank))
        return LoraUpdate(down, up, self._config.scale(module))

    def _rows(self, key: str, module: str) -> ReplacedRows:
        vocab, hidden = self._shapes[self._modules[module]]
        token_ids = self._config.token_ids(module)
        for token_id in token_ids:
            if not 0 <= token_id < vocab:
                raise CheckpointError(
                    f"{self._config.path}: trainable_token_indices names token {token_id}, the "
                    f"base's go from 0 to {vocab - 1}"
                )
        if len(set(token_ids)) < len(token_ids):
            raise CheckpointError(f"{self._config.path}: trainable_token_indices repeats a token")
        return ReplacedRows(token_ids, self._array(key, (len(token_ids), hidden)))

    def _array(self, key: str, shape: tuple[int, ...]) -> Float32Array:
        entry = self._weights.entries[key]
        if entry.shape != shape:
            raise CheckpointError(
                f"{self._weights.path}: tensor {key!r} has shape {list(entry.shape)}, the base and "
                f"{CONFIG_FILE} ask for {list(shape)}"
            )
        stored = StoredTensor(key, entry.shape, entry.kind, self._weights.data(key))
        values = stored.to_float32()
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{self._weights.path}: tensor {key!r} holds values that are not finite"
            )
        return values
