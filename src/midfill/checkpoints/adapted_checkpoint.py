"""AdaptedCheckpoint: a base model with a LoRA adapter merged into it, seen as one checkpoint.

Merging happens when a tensor is asked for, so that what is served has the base's size and speed.
"""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from midfill.checkpoints import requantise
from midfill.checkpoints.adapter import Adapter, FimTokens, ReplacedRows
from midfill.checkpoints.checkpoint import ADAPTER_KEY, FRAGMENTS_KEY, Checkpoint
from midfill.checkpoints.low_rank import LowRankUpdate
from midfill.checkpoints.requantise import LAYOUTS, Rounding
from midfill.models.config import ModelConfig
from midfill.models.stored_tensor import StoredTensor
from midfill.tokens.tokenizer import Tokenizer

_FLOATS = ("f32", "f16", "bf16")
_FALLBACK = "q8_0"  # for kinds that can't be written: next to nothing is lost in eight bits


class AdaptedCheckpoint:
    """A base and an adapter. Implements ``Checkpoint``.

    A merged tensor is of its base's kind where that is one of ``requantise.LAYOUTS``, "q8_0" where
    it is another quantised kind, and "f32" where the base stores floats.

    Attributes:
        path, config: the base's.
        metadata: the base's; the adapter's FIM tokens take the place of its own, and
            ``midfill.fragments`` says whether the model was trained on text tokenised in fragments.
        base, adapter: the two.
        exact: merged tensors are float32, whatever the base stores.
        rounding: how the others are requantised; the adapter's own rule if None is given.
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
            **base.metadata,
            **(_fim_metadata(adapter.record.fim, base.tokenizer) if adapter.record.fim else {}),
            **({FRAGMENTS_KEY: True} if adapter.record.fragments else {}),
            ADAPTER_KEY: adapter.name,
        }

    @property
    def tokenizer(self) -> Tokenizer:
        """The base's."""
        return self.base.tokenizer

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the base's, the adapter's, and how they are merged."""
        return self._digest(self.base.fingerprint)

    @cached_property
    def content_digest(self) -> str:
        """See ``Checkpoint.content_digest``; nothing is merged for it."""
        return self._digest(self.base.content_digest)

    def names(self) -> list[str]:
        """Canonical names of the tensors the base holds."""
        return self.base.names()

    def tensor(self, name: str) -> StoredTensor:
        """One tensor by canonical name, merged if the adapter changes it.

        Raises:
            CheckpointError: the base can't give it.
        """
        tensor = self.base.tensor(name)
        update, rows = self.adapter.updates.get(name), self.adapter.rows.get(name)
        if update is not None:
            tensor = self._updated(tensor, update)
        if rows is not None:
            tensor = self._with_rows(tensor, rows)
        return tensor

    def _updated(self, tensor: StoredTensor, update: LowRankUpdate) -> StoredTensor:
        if tensor.kind in LAYOUTS and not self.exact:
            return requantise.requantise(tensor, update.matrix(), self.rounding)
        merged = tensor.to_float32() + update.matrix()
        if tensor.kind in _FLOATS or self.exact:
            return StoredTensor(tensor.name, tensor.shape, "f32", merged)
        return _quantised(tensor.name, merged, _FALLBACK)

    def _with_rows(self, tensor: StoredTensor, rows: ReplacedRows) -> StoredTensor:
        where = list(rows.token_ids)
        if tensor.kind in _FLOATS or self.exact or tensor.kind not in LAYOUTS:
            values = tensor.to_float32().copy()
            values[where] = rows.values
            if tensor.kind in _FLOATS or self.exact:
                return StoredTensor(tensor.name, tensor.shape, "f32", values)
            return _quantised(tensor.name, values, _FALLBACK)
        data = np.array(tensor.data)
        data[where] = _quantised(tensor.name, rows.values, tensor.kind).data
        return StoredTensor(tensor.name, tensor.shape, tensor.kind, data)

    def _digest(self, of_base: str) -> str:
        how = "exact" if self.exact else f"{self.rounding} {requantise.VERSION}"
        text = f"{of_base} {self.adapter.fingerprint} {how}"
        return hashlib.sha256(text.encode()).hexdigest()


def _quantised(name: str, values: npt.NDArray[np.float32], kind: str) -> StoredTensor:
    """Rows of floats rounded to the nearest code of a GGML kind."""
    blocks = quantize(values, GGMLQuantizationType[kind.upper()])
    return StoredTensor(name, values.shape, kind, blocks.reshape(len(values), -1))


def _fim_metadata(fim: FimTokens, tokenizer: Tokenizer) -> dict[str, object]:
    """What a GGUF file says of these tokens, so that whoever reads metadata finds them."""
    ids = tokenizer.special_tokens
    return {
        "tokenizer.ggml.fim_pre_token_id": ids[fim.prefix],
        "tokenizer.ggml.fim_suf_token_id": ids[fim.suffix],
        "tokenizer.ggml.fim_mid_token_id": ids[fim.middle],
        "eot_token": list(fim.stop),
    }
