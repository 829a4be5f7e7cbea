"""A checkpoint whose matrices are stored in other kinds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ggml_blocks import random_matrix
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.lora_merge import BLOCK_LAYOUTS
from midfill.models.config import ModelConfig
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.stored_tensor import StoredTensor


@dataclass
class RequantizedCheckpoint:
    """A checkpoint whose matrices are stored in the kinds that a function names.

    K-quants, which the gguf library only reads, get random weights instead of the base's.
    """

    base: Checkpoint
    kind_of: Callable[[str], str]

    def __post_init__(self) -> None:
        self.path: Path = self.base.path
        self.config: ModelConfig = self.base.config
        self.metadata: Mapping[str, object] = self.base.metadata
        kinds = "-".join(map(self.kind_of, self.base.names()))
        self.fingerprint = self.content_digest = f"{self.base.content_digest}-{hash(kinds)}"

    @property
    def tokenizer(self) -> Tokenizer:
        return self.base.tokenizer

    def names(self) -> list[str]:
        return self.base.names()

    def kind(self, name: str) -> str:
        return self.tensor(name).kind

    def shape(self, name: str) -> tuple[int, ...]:
        return self.base.shape(name)

    def tensor(self, name: str) -> StoredTensor:
        tensor, kind = self.base.tensor(name), self.kind_of(name)
        if len(tensor.shape) < 2:
            return tensor
        rows, inputs = tensor.shape
        if kind not in BLOCK_LAYOUTS:
            return replace(random_matrix(kind, rows, inputs, inputs**-0.5), name=name)
        blocks = quantize(tensor.to_float32(), GGMLQuantizationType[kind.upper()])
        return replace(tensor, kind=kind, data=blocks.reshape(rows, -1))
