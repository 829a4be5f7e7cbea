"""Example: an infilling task as token ids with the weight of each in the loss."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from midfill.infill.formats import FimFormat
from midfill.infill.layout import TextSegment, lay_out
from midfill.tokens.tokenizer import Tokenizer
from midfill.training.fragments import fragment_cuts, pieces_of, unpredictable
from midfill.training.holes import Hole
from midfill.training.recipe import DataRecipe


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt with its answer, ready to be packed.

    Attributes:
        ids: int32 [tokens].
        weights: float32 [tokens]: how much predicting this token counts; 0 for what is only read.
        typed: bool [tokens]: whether it ends before the caret, in the text after MID.
        hole: the task it was made of.
        borders: indexes of tokens that begin a fragment which is no segment's first.
    """

    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    typed: npt.NDArray[np.bool_]
    hole: Hole
    borders: tuple[int, ...] = ()

    @property
    def characters(self) -> int:
        """How many of the document's are in it."""
        return self.hole.stop - self.hole.start


@dataclass(frozen=True)
class ExampleMaker:
    """Turns holes into examples in one model's format, laid out as the server lays prompts out.

    Args:
        tokenizer: the model's.
        format: its sentinels.
        end_token_id: what the model writes when the gap is filled.
        recipe: layouts, fragments and weights.
    """

    tokenizer: Tokenizer
    format: FimFormat
    end_token_id: int
    recipe: DataRecipe

    def make(self, text: str, hole: Hole, draw: random.Random, *, fragments: bool) -> Example:
        """One example.

        Args:
            text: the document the hole is in.
            draw: random source of the fragments alone, so that examples with and without
                fragments differ in nothing else.
            fragments: whether to tokenise in fragments.
        """
        prefix, middle = text[hole.start : hole.caret], text[hole.caret : hole.end]
        suffix = text[hole.end : hole.stop]
        # Suffix-first formats end with the prefix as it is; nothing of it is an increment.
        cut = len(prefix) if self.format.order == "spm" else hole.cut
        segments, _ = lay_out(self.format, prefix[:cut], suffix, cut)
        bos = self.tokenizer.bos_token_id
        ids = [bos] if self.tokenizer.add_bos and bos is not None else []
        borders: list[int] = []
        drawn = draw if fragments else None
        for segment in segments:
            if isinstance(segment, TextSegment):
                cuts = [] if drawn is None else self._cuts(len(segment.text), None, drawn)
                _join(self._encoded(segment.text, cuts), ids, borders)
            else:
                ids.append(segment.token_id)
        read = len(ids)
        increment, written = prefix[cut:], prefix[cut:] + middle
        cuts = [] if drawn is None else self._cuts(len(written), len(increment) or None, drawn)
        pieces = self._encoded(written, cuts)
        skipped, typed = self._marks(written, pieces, len(increment.encode()))
        _join(pieces, ids, borders)
        weights = np.where(typed, self.recipe.increment_weight, 1.0)
        weights[skipped] = 0.0
        return Example(
            np.array([*ids, self.end_token_id], np.int32),
            np.array([*[0.0] * read, *weights, self.recipe.end_weight], np.float32),
            np.array([*[False] * read, *typed, False]),
            hole,
            tuple(borders),
        )

    def _cuts(self, length: int, caret: int | None, draw: random.Random) -> list[int]:
        return fragment_cuts(length, caret, self.recipe, draw)

    def _encoded(self, text: str, cuts: Sequence[int]) -> list[list[int]]:
        """Ids of each fragment of a text."""
        return [self.tokenizer.encode_continuation(piece) for piece in pieces_of(text, cuts)]

    def _marks(
        self, text: str, pieces: list[list[int]], border: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Which tokens between MID and the end token can't be learned, and which were typed.

        Args:
            text: what stands there.
            pieces: ids of its fragments.
            border: the caret's place in it, in bytes; a token across it is the hole's.
        """
        whole = pieces if len(pieces) < 2 else self._encoded(text, ())
        lengths = [self._byte_lengths(piece) for piece in pieces]
        skipped = unpredictable([n for piece in whole for n in self._byte_lengths(piece)], lengths)
        ends = np.cumsum([n for piece in lengths for n in piece])
        return np.array(skipped, np.bool_), ends <= border

    def _byte_lengths(self, ids: Sequence[int]) -> list[int]:
        return [len(self.tokenizer.token_bytes(each)) for each in ids]


def _join(pieces: Sequence[Sequence[int]], ids: list[int], borders: list[int]) -> None:
    """Append the ids of some fragments, and where all but the first begin."""
    for number, piece in enumerate(pieces):
        if number:
            borders.append(len(ids))
        ids += piece
