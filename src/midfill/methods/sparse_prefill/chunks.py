"""What methods of sparse prefill have in common: their chunks, and when these are dense."""

from dataclasses import dataclass

from midfill.errors import InvalidRequestError
from midfill.runners.forward.attention import QUERY_BLOCK

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
        if self.tokens < QUERY_BLOCK or self.tokens % QUERY_BLOCK:
            raise InvalidRequestError(
                f"chunk must be a multiple of {QUERY_BLOCK}, not {self.tokens}", param="method"
            )
        if self.dense < 0:
            raise InvalidRequestError("dense must be at least 0", param="method")

    def is_dense(self, first: int, rows: int) -> bool:
        """Return whether a chunk attends to everything.

        One with fewer rows than are probed does: it costs about as much to look where they attend.
        """
        return rows < PROBED_ROWS or first + rows <= self.dense
