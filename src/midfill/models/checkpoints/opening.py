"""Open a model: the checkpoint at a path, and the adapter that is merged into it.

Each tensor of an ``AdaptedCheckpoint`` is merged when it is requested. The served model keeps the
base's size and speed.
"""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from midfill.config import WeightsOption
from midfill.errors import CheckpointError, ModelNotFoundError
from midfill.models.checkpoints.adapter import Adapter, AdapterRecord, load_adapter
from midfill.models.checkpoints.checkpoint import (
    ADAPTER_KEY,
    FRAGMENTS_KEY,
    Checkpoint,
)
from midfill.models.checkpoints.gguf import GgufCheckpoint
from midfill.models.checkpoints.huggingface import HuggingFaceCheckpoint
from midfill.models.checkpoints.lora_update import ROUNDING_VERSION, Rounding
from midfill.models.checkpoints.model_record import NEED_KEYS
from midfill.models.config import ModelConfig
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.stored_tensor import StoredTensor


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file, a Hugging Face folder, or a folder with one GGUF file in it.

    Raises:
        ModelNotFoundError: the path holds nothing that could be a model.
        CheckpointError: the model is broken, truncated or of an unsupported kind.
    """
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


def open_model(
    path: Path, adapter: Path | None = None, weights: WeightsOption = "auto"
) -> Checkpoint:
    """Open a checkpoint, with an adapter merged into it if one is given.

    Args:
        path: see ``open_checkpoint``.
        adapter: an adapter's folder; None for none.
        weights: how the weights will be stored. "q8" and "f32" can represent more of the update
            than a quantised base's own grid, so the merge is then exact.

    Raises:
        ModelNotFoundError: there is no model, or no adapter.
        CheckpointError: one of them is broken, or they do not fit each other.
    """
    base = open_checkpoint(path)
    if adapter is None:
        return base
    return AdaptedCheckpoint(base, load_adapter(adapter, base), exact=weights in ("q8", "f32"))


def model_digest(checkpoint: Checkpoint) -> str:
    """Return the digest under which what is measured of a model is kept.

    It is the same however the adapter is merged and the weights are stored: that changes answers
    little.
    """
    if isinstance(checkpoint, AdaptedCheckpoint):
        return AdaptedCheckpoint(checkpoint.base, checkpoint.adapter).content_digest
    return checkpoint.content_digest


class AdaptedCheckpoint:
    """A base and an adapter. Implements ``Checkpoint``.

    What kind a merged tensor has, ``lora_merge.merged_kind`` says.

    Attributes:
        path, config: the base's.
        metadata: the base's, with the adapter's FIM tokens and its rules of prompts and ends in
            place of its own, and with ``midfill.fragments`` where the model was trained on text
            tokenised in fragments.
        base, adapter: what is merged.
        exact: whether merged tensors are float32, whatever the base stores.
        rounding: how updates are added to quantised tensors; the adapter's own rule by default.
    """

    def __init__(
        self,
        base: Checkpoint,
        adapter: Adapter,
        *,
        exact: bool = False,
        rounding: Rounding | None = None,
    ) -> None:
        self.base = base
        self.adapter = adapter
        self.exact = exact
        self.rounding: Rounding = rounding or adapter.record.rounding
        self.path: Path = base.path
        self.config: ModelConfig = base.config
        self.metadata: Mapping[str, object] = {
            **_without_needs(base.metadata),
            **_fim_metadata(adapter.record, base),
            **adapter.record.needs,
            **({FRAGMENTS_KEY: True} if adapter.record.fragments else {}),
            ADAPTER_KEY: adapter.name,
        }

    @property
    def tokenizer(self) -> Tokenizer:
        """The base's tokenizer."""
        return self.base.tokenizer

    @cached_property
    def fingerprint(self) -> str:
        """Digest of base, adapter and the way they are merged."""
        return self._digest(self.base.fingerprint)

    @cached_property
    def content_digest(self) -> str:
        """See ``Checkpoint.content_digest``; nothing is merged for it."""
        return self._digest(self.base.content_digest)

    def names(self) -> list[str]:
        """Return the canonical names of the tensors the base holds."""
        return self.base.names()

    def kind(self, name: str) -> str:
        """Return the kind of one tensor; nothing is merged for it."""
        kind = self.base.kind(name)
        if name not in self.adapter.updates and name not in self.adapter.rows:
            return kind
        from midfill.models.checkpoints.lora_merge import merged_kind

        return merged_kind(kind, exact=self.exact)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return self.base.shape(name)

    def tensor(self, name: str) -> StoredTensor:
        """Return one tensor by canonical name, merged if the adapter changes it.

        Raises:
            CheckpointError: the base can't provide it, or the adapter's part of it is broken.
        """
        tensor = self.base.tensor(name)
        update, rows = self.adapter.updates.get(name), self.adapter.rows.get(name)
        if update is None and rows is None:
            return tensor
        # Compiled, so a process that only describes the model must not load it.
        from midfill.models.checkpoints.lora_merge import merge

        try:
            return merge(tensor, update, rows, self.rounding, exact=self.exact)
        except CheckpointError as error:
            raise CheckpointError(f"{self.adapter.path}: {error}") from None

    def _digest(self, of_base: str) -> str:
        how = "exact" if self.exact else f"{self.rounding} {ROUNDING_VERSION}"
        text = f"{of_base} {self.adapter.fingerprint} {how}"
        return hashlib.sha256(text.encode()).hexdigest()


def _without_needs(metadata: Mapping[str, object]) -> dict[str, object]:
    """Return a base's metadata without its rules of prompts and ends: its adapter changed them."""
    return {key: value for key, value in metadata.items() if key not in NEED_KEYS}


def _fim_metadata(record: AdapterRecord, base: Checkpoint) -> dict[str, object]:
    """Return the FIM tokens under the keys that GGUF files use for them."""
    fim = record.fim_tokens
    if fim is None:
        return {}
    ids = base.tokenizer.special_tokens
    return {
        "tokenizer.ggml.fim_pre_token_id": ids[fim.prefix],
        "tokenizer.ggml.fim_suf_token_id": ids[fim.suffix],
        "tokenizer.ggml.fim_mid_token_id": ids[fim.middle],
        "eot_token": list(record.stop_tokens),
    }
