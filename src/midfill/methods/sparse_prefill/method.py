"""PrefillMethod: the protocol of methods that compute a part of a prompt's attention.

Rows of the prompt attend to the keys that the method lists, layer by layer; tokens after the prompt
attend to everything. What a layer computes from fewer keys is approximate, and so is the KV of the
layers after it. It is shared only with prompts under the same method, in whole chunks, and never
taken for exact.

The method owns its chunk boundaries: a chunk is listed as a whole and runs in one step, whatever
else does. Chunks are counted from the prompt's first token, so what a chunk computes depends on the
tokens up to its end alone, and neither load nor the prefix cache changes an answer.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from midfill.methods.budget import require
from midfill.runners.forward.attention import QUERY_BLOCK, LayerProbe, SpanLists


@runtime_checkable
class PrefillMethod(Protocol):
    """A method with its hyper-parameters, ready for a model. It has no state."""

    @property
    def variant(self) -> str:
        """Name what KV computed under it depends on beside the tokens: "minference:chunk=1024"."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens per chunk, a multiple of 64; the last chunk of a prompt may have fewer."""

    def is_dense(self, first: int, rows: int) -> bool:
        """Return whether a chunk attends to everything, so that ``plan`` is not asked.

        Args:
            first: position of its first row.
            rows: how many it has.
        """

    def plan(self, probe: LayerProbe) -> SpanLists:
        """Return the keys of one layer's rows; depends on its argument alone."""


PROBED_ROWS = 64
"""Rows at a chunk's end whose attention tells where the whole chunk's lies."""


@dataclass(frozen=True)
class ChunkRule:
    """How a prompt is cut into chunks.

    Attributes:
        tokens: per chunk; a multiple of 64.
        dense: a chunk whose last row sees at most so many keys attends to all.
    """

    tokens: int
    dense: int

    def __post_init__(self) -> None:
        require(
            self.tokens >= QUERY_BLOCK and self.tokens % QUERY_BLOCK == 0,
            f"chunk must be a multiple of {QUERY_BLOCK}, not {self.tokens}",
        )
        require(self.dense >= 0, "dense must be at least 0")

    def is_dense(self, first: int, rows: int) -> bool:
        """Return whether a chunk attends to everything.

        One with fewer rows than are probed does: it costs about as much to look where they attend.
        """
        return rows < PROBED_ROWS or first + rows <= self.dense
