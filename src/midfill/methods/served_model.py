"""ServedModel: what a method may know of the model that it is to be used with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from midfill.arrays import Float32Array
from midfill.methods.budget import require
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
        encode: returns a text's tokens; None if nobody knows.
        embed: returns a text's vector, of length 1, by a sentence encoder; None if there is none.
        latent_parts: by how many processes its latents are kept, each a part.
    """

    config: ModelConfig
    backend: Literal["cpu", "torch"] = "cpu"
    digest: str = ""
    options: str = ""
    kv_cache_dtype: str = "f16"
    token_bytes: Callable[[int], bytes] | None = None
    encode: Callable[[str], Sequence[int]] | None = None
    embed: Callable[[str], Float32Array] | None = None
    latent_parts: int = 1


def refuse_quantized_cache(name: str, model: ServedModel) -> None:
    """Refuse a model whose keys are rounded as a whole: queries choose among the keys themselves.

    Args:
        name: of the method, for the message.
        model: the model.

    Raises:
        InvalidRequestError: its KV cache is quantised.
    """
    require(
        model.kv_cache_dtype not in ("i8", "i4"),
        "chooses among keys as they are and needs a KV cache of f16, bf16 or f32, not"
        f" {model.kv_cache_dtype} (--kv-cache-dtype)",
        name,
    )
