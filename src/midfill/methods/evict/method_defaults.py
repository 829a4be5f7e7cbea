"""What most methods have in common, as base classes."""

from typing import Self

from midfill.arrays import Float32Array
from midfill.methods.evict.method import SequenceKeys
from midfill.models.config import ModelConfig


class MethodDefaults:
    """Answers of a method that observes nothing and decides once; fields of the same name win."""

    @property
    def observed_rows(self) -> int:
        """No row."""
        return 0

    @property
    def block_rows(self) -> int:
        """No blocks: all observed rows go to ``select``."""
        return 0

    @property
    def interval(self) -> int:
        """Never again."""
        return 0


class OneShot(MethodDefaults):
    """Base of methods without state: each is its own compressor."""

    def start(self, config: ModelConfig) -> Self:
        """Return the method itself; it has no state."""
        return self

    def fork(self) -> Self:
        """Return the method itself; it has no state."""
        return self

    def observe(self, keys: SequenceKeys, queries: Float32Array) -> None:
        """Do nothing; it has no state."""
