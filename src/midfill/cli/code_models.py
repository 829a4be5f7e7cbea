"""Models for code that this machine could serve, and how fast at most."""

from collections.abc import Iterator
from dataclasses import dataclass

from midfill.system.machine import format_size

_BYTES_PER_WEIGHT = 0.65  # of --weights q4, with scales
_BESIDE = 2**29  # bytes of memory for KV and libraries
_USABLE = 10.0  # tokens/s below which completions come too late for typing


@dataclass(frozen=True, slots=True)
class CodeModel:
    """A model that has learnt to infill code.

    Attributes:
        name: on the Hugging Face hub.
        weights: how many it has.
        read: how many of them each token reads: all but the rows of an embedding of its own.
    """

    name: str
    weights: int
    read: int

    @property
    def command(self) -> str:
        """What serves it."""
        return f"midfill serve {self.name} --weights q4"

    @property
    def memory(self) -> float:
        """Bytes that serving it takes."""
        return self.weights * _BYTES_PER_WEIGHT + _BESIDE

    @property
    def download(self) -> int:
        """Bytes to download on first use."""
        return 2 * self.weights

    def tokens_per_second(self, bytes_per_second: float) -> float:
        """Return the tokens/s of one stream that a memory bandwidth allows."""
        return bytes_per_second / (self.read * _BYTES_PER_WEIGHT)


CODE_MODELS = (
    CodeModel("Qwen/Qwen2.5-Coder-0.5B", weights=494_032_768, read=494_032_768),
    CodeModel("Qwen/Qwen2.5-Coder-1.5B", weights=1_543_714_304, read=1_543_714_304),
    CodeModel("Qwen/Qwen2.5-Coder-7B", weights=7_615_616_512, read=7_070_619_136),
)
"""All under Apache-2.0, smallest first."""


def code_models(bytes_per_second: float, memory: float, *, usable: bool = False) -> Iterator[str]:
    """Yield a line per model that fits into memory: its command, speed and size.

    Args:
        bytes_per_second: the memory bandwidth.
        memory: bytes that are free.
        usable: leave out those that are too slow for typing, but for the smallest.
    """
    for model in CODE_MODELS:
        speed = model.tokens_per_second(bytes_per_second)
        slow = usable and speed < _USABLE and model is not CODE_MODELS[0]
        if model.memory <= memory and not slow:
            size = f"downloads {format_size(model.download)} on first use"
            yield f"{model.command:52}  # {speed:,.0f} tokens/s, {size}"
