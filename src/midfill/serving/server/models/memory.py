"""Which models give way to one that is needed: pure, decided on numbers alone."""

from collections.abc import Collection
from dataclasses import dataclass

_LEAST_KV = 8  # KV of a model gets at least this fraction of the memory of all


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory.

    Attributes:
        name: the model's.
        bytes: what it takes, weights and KV.
        last_used: when its last request ended, on any clock; infinity while it has some.
        pinned: whether it stays in memory.
    """

    name: str
    bytes: int
    last_used: float
    pinned: bool = False


def models_to_unload(
    loaded: Collection[LoadedModel], needed: int, memory: int
) -> tuple[str, ...] | None:
    """Return the models that give way to one more, those unused longest first.

    Args:
        loaded: the models in memory.
        needed: bytes that the other takes.
        memory: bytes that all may take together.

    Returns:
        Their names, no more than needed; None if there is no room beside the pinned ones.
    """
    free = memory - sum(model.bytes for model in loaded)
    chosen: list[str] = []
    unpinned = (model for model in loaded if not model.pinned)
    for model in sorted(unpinned, key=lambda model: model.last_used):
        if free >= needed:
            break
        chosen.append(model.name)
        free += model.bytes
    return tuple(chosen) if free >= needed else None


def kv_bytes_each(weights: Collection[int], memory: int) -> int:
    """Return how much memory each model's KV may take.

    It is an equal part of what remains beside the weights of all, so that all can be in memory at
    once where they fit, and never less than an eighth of the memory.

    Args:
        weights: bytes of each model's.
        memory: bytes that all may take together.
    """
    return max((memory - sum(weights)) // len(weights), memory // _LEAST_KV)
