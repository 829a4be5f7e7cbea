"""Packing: whole examples side by side in rows of bounded length; none attends to another."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from midfill.training.examples import Example

_MAX_OPEN_ROWS = 8


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Some examples, one after the other.

    Attributes:
        ids: int32 [tokens].
        weights: float32 [tokens], see ``Example``.
        in_increment: bool [tokens], see ``Example``.
        cu_seqlens: int32 [examples + 1], where each example starts, and the row's length.
        characters: number of document characters in the row.
    """

    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    in_increment: npt.NDArray[np.bool_]
    cu_seqlens: npt.NDArray[np.int32]
    characters: int

    @classmethod
    def pack(cls, examples: Sequence[Example]) -> "PackedRow":
        """Put examples into a row."""
        return cls(
            ids=np.concatenate([example.ids for example in examples]),
            weights=np.concatenate([example.weights for example in examples]),
            in_increment=np.concatenate([example.in_increment for example in examples]),
            cu_seqlens=np.cumsum([0, *(len(example.ids) for example in examples)], dtype=np.int32),
            characters=sum(example.characters for example in examples),
        )

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """int32 [tokens], counted from the first token of each example."""
        lengths = np.diff(self.cu_seqlens)
        return np.arange(len(self.ids), dtype=np.int32) - np.repeat(self.cu_seqlens[:-1], lengths)


@dataclass
class Packer:
    """Puts each example into the fullest open row with room for it, and closes full rows.

    Attributes:
        row_tokens: maximum length of a row; longer examples are dropped.
        rows: examples of each open row.
        dropped: number of examples that were too long.
    """

    row_tokens: int
    rows: list[list[Example]] = field(default_factory=list)
    dropped: int = 0

    def add(self, example: Example) -> PackedRow | None:
        """Add an example; return a row if one was closed to make room."""
        if len(example.ids) > self.row_tokens:
            self.dropped += 1
            return None
        fitting = [row for row in self.rows if _length(row) + len(example.ids) <= self.row_tokens]
        if fitting:
            max(fitting, key=_length).append(example)
            return None
        self.rows.append([example])
        if len(self.rows) <= _MAX_OPEN_ROWS:
            return None
        fullest = max(range(len(self.rows)), key=lambda at: _length(self.rows[at]))
        return PackedRow.pack(self.rows.pop(fullest))


def _length(row: Iterable[Example]) -> int:
    return sum(len(example.ids) for example in row)
