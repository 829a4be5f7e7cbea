"""Packing: whole examples side by side in rows of bounded length, none seeing another."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from midfill.training.examples import Example

_OPEN_ROWS = 8


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Some examples one after the other.

    Attributes:
        ids: int32 [tokens].
        weights: float32 [tokens], see ``Example``.
        typed: bool [tokens], see ``Example``.
        starts: int32 [examples + 1], where each example begins, and where the last one ends.
        characters: of document text in it.
    """

    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    typed: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int32]
    characters: int

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """int32 [tokens], counted from each example's first token."""
        lengths = np.diff(self.starts)
        return np.arange(len(self.ids), dtype=np.int32) - np.repeat(self.starts[:-1], lengths)


@dataclass
class Packer:
    """Puts each example into the fullest open row it fits in; gives out rows that are full.

    Attributes:
        row_tokens: longest row; longer examples are refused.
        rows: open rows, the examples of each.
        refused: examples that were too long.
    """

    row_tokens: int
    rows: list[list[Example]] = field(default_factory=list)
    refused: int = 0

    def add(self, example: Example) -> PackedRow | None:
        """Take an example in; returns a row when one had to be closed to make room."""
        if len(example.ids) > self.row_tokens:
            self.refused += 1
            return None
        fitting = [row for row in self.rows if _length(row) + len(example.ids) <= self.row_tokens]
        if fitting:
            max(fitting, key=_length).append(example)
            return None
        self.rows.append([example])
        if len(self.rows) <= _OPEN_ROWS:
            return None
        fullest = max(range(len(self.rows)), key=lambda at: _length(self.rows[at]))
        return _packed(self.rows.pop(fullest))

    def flush(self) -> Iterator[PackedRow]:
        """The rows that are still open."""
        while self.rows:
            yield _packed(self.rows.pop(0))


def _length(row: Iterable[Example]) -> int:
    return sum(len(example.ids) for example in row)


def _packed(examples: list[Example]) -> PackedRow:
    return PackedRow(
        ids=np.concatenate([example.ids for example in examples]),
        weights=np.concatenate([example.weights for example in examples]),
        typed=np.concatenate([example.typed for example in examples]),
        starts=np.cumsum([0, *(len(example.ids) for example in examples)], dtype=np.int32),
        characters=sum(example.characters for example in examples),
    )
