"""Packing: whole examples side by side in rows of bounded length; none attends to another."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from midfill.lab.training.examples import Example

_MAX_OPEN_ROWS = 8


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Some examples, one after the other.

    Attributes:
        ids: int32 [tokens].
        weights: float32 [tokens], see ``Example``.
        without_end: bool [tokens], see ``Example``.
        cu_seqlens: int32 [examples + 1], where each example starts, and the row's length.
        characters: number of document characters in the row.
        plain_ids: int32 [plain tokens], the examples' plain texts, see ``Example``.
        plain_cu_seqlens: int32 [examples + 1], the bounds of these.
        aligned: int32 [pairs, 2], indexes into ``ids`` and ``plain_ids``, see ``Example``.
    """

    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    without_end: npt.NDArray[np.bool_]
    cu_seqlens: npt.NDArray[np.int32]
    characters: int
    plain_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    plain_cu_seqlens: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(1, np.int32))
    aligned: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 2), np.int32))

    @classmethod
    def pack(cls, examples: Sequence[Example]) -> "PackedRow":
        """Put examples into a row."""
        bounds = _bounds([example.ids for example in examples])
        plain_bounds = _bounds([example.plain_ids for example in examples])
        starts = np.stack([bounds[:-1], plain_bounds[:-1]], axis=1)
        return cls(
            ids=np.concatenate([example.ids for example in examples]),
            weights=np.concatenate([example.weights for example in examples]),
            without_end=np.concatenate([example.without_end for example in examples]),
            cu_seqlens=bounds,
            characters=sum(example.characters for example in examples),
            plain_ids=np.concatenate([example.plain_ids for example in examples]),
            plain_cu_seqlens=plain_bounds,
            aligned=np.concatenate(
                [each.aligned + start for each, start in zip(examples, starts, strict=True)]
            ),
        )

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """int32 [tokens], counted from the first token of each example."""
        return _positions(self.cu_seqlens)

    @property
    def plain_positions(self) -> npt.NDArray[np.int32]:
        """int32 [plain tokens], counted from the first token of each plain text."""
        return _positions(self.plain_cu_seqlens)


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


def _bounds(parts: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    return np.cumsum([0, *map(len, parts)], dtype=np.int32)


def _positions(bounds: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return np.arange(bounds[-1], dtype=np.int32) - np.repeat(bounds[:-1], np.diff(bounds))


def _length(row: Iterable[Example]) -> int:
    return sum(len(example.ids) for example in row)
