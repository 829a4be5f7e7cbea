"""ServedModel: what a method may know of the model that it is to be used with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from midfill.models.config import ModelConfig


@dataclass(frozen=True)
class ServedModel:
    """What a method may know of the model that it is to be used with.

    Attributes:
        config: its shape.
        backend: what runs it: the CPU kernels, or torch.
        digest: ``models.checkpoints.opening.model_digest``, which covers the adapter, too.
        options: how commands name it: "--model smollm2-135m".
        kv_cache_dtype: how its keys and values are stored, by ``CellLayout``.
        token_bytes: returns what a token stands for, b"" if that is no text; None if nobody knows.
    """

    config: ModelConfig
    backend: Literal["cpu", "torch"] = "cpu"
    digest: str = ""
    options: str = ""
    kv_cache_dtype: str = "f16"
    token_bytes: Callable[[int], bytes] | None = None
