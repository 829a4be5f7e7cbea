"""Example: an infilling task as token ids with loss weights."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from midfill.infill.formats import FimFormat
from midfill.infill.layout import TextSegment, lay_out
from midfill.tokens.tokenizer import Tokenizer
from midfill.training.fragments import broken_token_mask, draw_cuts, split_at
from midfill.training.holes import Hole
from midfill.training.recipe import DataRecipe


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt with its answer.

    Attributes:
        ids: int32 [tokens].
        weights: float32 [tokens], loss weight of each token; 0 for tokens that are input only.
        in_increment: bool [tokens], True for the tokens between MID and the caret.
        hole: the task.
        fragment_starts: indexes of tokens that start a fragment, except the first of a segment.
    """

    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    in_increment: npt.NDArray[np.bool_]
    hole: Hole
    fragment_starts: tuple[int, ...] = ()

    @property
    def characters(self) -> int:
        """Number of the document's characters in the example."""
        return self.hole.stop - self.hole.start


@dataclass(frozen=True)
class ExampleMaker:
    """Turns holes into examples for one model, in the layouts that the server sends.

    Args:
        tokenizer: the model's.
        format: its FIM tokens.
        end_token_id: the token that ends an answer.
        recipe: fragments and loss weights.
    """

    tokenizer: Tokenizer
    format: FimFormat
    end_token_id: int
    recipe: DataRecipe

    def make(self, text: str, hole: Hole, rng: random.Random, *, fragments: bool) -> Example:
        """Make one example.

        Args:
            text: the document.
            hole: a hole in it.
            rng: random source of the fragments only, so that examples with and without
                fragments differ in nothing else.
            fragments: whether to tokenise in fragments.
        """
        prefix, middle = text[hole.start : hole.caret], text[hole.caret : hole.end]
        suffix = text[hole.end : hole.stop]
        # Suffix-first formats end with the whole prefix; there is no increment.
        cut = len(prefix) if self.format.order == "spm" else hole.cut
        segments, _ = lay_out(self.format, prefix[:cut], suffix, cut)
        bos = self.tokenizer.bos_token_id
        ids = [bos] if self.tokenizer.add_bos and bos is not None else []
        starts: list[int] = []
        source = rng if fragments else None
        for segment in segments:
            if isinstance(segment, TextSegment):
                cuts = [] if source is None else self._draw_cuts(len(segment.text), None, source)
                _append(self._encode_fragments(segment.text, cuts), ids, starts)
            else:
                ids.append(segment.token_id)
        prompt_length = len(ids)
        increment, target = prefix[cut:], prefix[cut:] + middle
        caret = len(increment) or None
        cuts = [] if source is None else self._draw_cuts(len(target), caret, source)
        encoded = self._encode_fragments(target, cuts)
        broken, in_increment = self._target_masks(target, encoded, len(increment.encode()))
        _append(encoded, ids, starts)
        weights = np.where(in_increment, self.recipe.increment_weight, 1.0)
        weights[broken] = 0.0
        return Example(
            np.array([*ids, self.end_token_id], np.int32),
            np.array([*[0.0] * prompt_length, *weights, self.recipe.end_weight], np.float32),
            np.array([*[False] * prompt_length, *in_increment, False]),
            hole,
            tuple(starts),
        )

    def _draw_cuts(self, length: int, caret: int | None, rng: random.Random) -> list[int]:
        return draw_cuts(length, caret, self.recipe, rng)

    def _encode_fragments(self, text: str, cuts: Sequence[int]) -> list[list[int]]:
        """Return the ids of each fragment of a text."""
        return [self.tokenizer.encode_continuation(each) for each in split_at(text, cuts)]

    def _target_masks(
        self, text: str, fragments: list[list[int]], caret: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return which tokens after MID are broken, and which of them lie before the caret.

        Args:
            text: the text after MID.
            fragments: ids of its fragments.
            caret: the caret's position in it, in bytes; a token across it belongs to the hole.
        """
        whole = fragments if len(fragments) < 2 else self._encode_fragments(text, ())
        lengths = [self._byte_lengths(fragment) for fragment in fragments]
        whole_lengths = [length for ids in whole for length in self._byte_lengths(ids)]
        broken = broken_token_mask(whole_lengths, lengths)
        ends = np.cumsum([length for fragment in lengths for length in fragment])
        return np.array(broken, np.bool_), ends <= caret

    def _byte_lengths(self, ids: Sequence[int]) -> list[int]:
        return [len(self.tokenizer.token_bytes(each)) for each in ids]


def _append(fragments: Sequence[Sequence[int]], ids: list[int], starts: list[int]) -> None:
    """Append the ids of fragments to ``ids``, and where all but the first start to ``starts``."""
    for number, fragment in enumerate(fragments):
        if number:
            starts.append(len(ids))
        ids += fragment
