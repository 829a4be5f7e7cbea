"""Example: an infilling task as token ids with loss weights."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from midfill.infill.cut_places import KeepsTokens
from midfill.infill.formats import FimFormat
from midfill.infill.layout import TextSegment, lay_out
from midfill.lab.training.alignment import aligned_tokens, token_starts
from midfill.lab.training.fragments import broken_token_mask, draw_cuts, split_at
from midfill.lab.training.holes import Hole
from midfill.lab.training.recipe import DataRecipe
from midfill.models.tokens.tokenizer import Tokenizer, keeps_tokens_of


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt with its answer.

    Attributes:
        ids: int32 [tokens].
        weights: float32 [tokens], loss weight of each token; 0 for tokens that are input only.
        without_end: bool [tokens], tokens of the increment at which the end token is excluded: the
            model never answers in their place.
        hole: the task.
        fragment_starts: indexes of tokens that start a fragment, except the first of a segment.
        plain_ids: int32 [plain tokens], the text before the caret and the hole's, as the base
            would read it: without the suffix, tokenised whole.
        aligned: int32 [pairs, 2], tokens of ``ids`` that are learned, and tokens of ``plain_ids``,
            that start at the same byte; the base says what it would write there.
    """

    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    without_end: npt.NDArray[np.bool_]
    hole: Hole
    fragment_starts: tuple[int, ...] = ()
    plain_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    aligned: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 2), np.int32))

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
        plain_text: whether examples have ``plain_ids``, which distillation needs.
    """

    tokenizer: Tokenizer
    format: FimFormat
    end_token_id: int
    recipe: DataRecipe
    plain_text: bool = False

    @cached_property
    def keeps_tokens(self) -> KeepsTokens:
        """Where the tokenizer allows a prompt to be cut."""
        return keeps_tokens_of(self.tokenizer)

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
        suffix = hole.line_break + text[hole.end : hole.stop]
        # Suffix-first formats end with the whole prefix; there is no increment.
        cut = len(prefix) if self.format.order == "spm" else hole.cut
        segments, _ = lay_out(self.format, prefix[:cut], suffix, cut)
        bos = self._bos()
        ids = list(bos)
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
        if source is not None and source.random() >= self.recipe.caret_share:
            caret = None
        cuts = [] if source is None else self._draw_cuts(len(target), caret, source)
        encoded = self._encode_fragments(target, cuts)
        broken, in_increment = self._target_masks(target, encoded, len(increment.encode()))
        _append(encoded, ids, starts)
        unfinished = self._draw_unfinished(encoded, in_increment, rng)
        weights = np.where(in_increment, self.recipe.increment_weight, 1.0)
        weights[unfinished] = 1.0
        weights[broken] = 0.0
        without_end = in_increment.copy()
        without_end[unfinished] = False
        plain, aligned = self._align(prefix[:cut], target, encoded, weights)
        aligned[:, 0] += prompt_length
        return Example(
            np.array([*ids, self.end_token_id], np.int32),
            np.array([*[0.0] * prompt_length, *weights, self.recipe.end_weight], np.float32),
            np.array([*[False] * prompt_length, *without_end, False]),
            hole,
            tuple(starts),
            plain,
            aligned,
        )

    def _draw_unfinished(
        self, encoded: list[list[int]], in_increment: npt.NDArray[np.bool_], rng: random.Random
    ) -> list[int]:
        """Draw tokens of the increment at line ends: before a line break, or right after one.

        An answer often ends there. Only the suffix says that this one does not.
        """
        texts = [self.tokenizer.token_bytes(each) for fragment in encoded for each in fragment]
        places = [
            at
            for at in np.flatnonzero(in_increment).tolist()
            if at > 0 and (texts[at].startswith(b"\n") or texts[at - 1].endswith(b"\n"))
        ]
        return rng.sample(places, min(len(places), self.recipe.unfinished_lines))

    def _align(
        self,
        head: str,
        target: str,
        encoded: list[list[int]],
        weights: npt.NDArray[np.float64],
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return ``Example.plain_ids`` and ``aligned``, the latter in tokens after MID.

        Args:
            head, target: the text before SUF, and what follows it in the document, to the hole's
                end.
            encoded: ids of the target's fragments.
            weights: of these ids.
        """
        if not self.plain_text:
            return np.zeros(0, np.int32), np.zeros((0, 2), np.int32)
        bos = self._bos()
        ids = [*bos, *self.tokenizer.encode_continuation(head + target)]
        starts = token_starts(self._byte_lengths(ids[len(bos) :]))
        target_lengths = [length for each in encoded for length in self._byte_lengths(each)]
        target_starts = token_starts(target_lengths, len(head.encode()))
        pairs = aligned_tokens(target_starts, starts)
        pairs[:, 1] += len(bos)
        # The base says nothing about its very first token.
        used = (weights[pairs[:, 0]] > 0) & (pairs[:, 1] > 0)
        return np.array(ids, np.int32), pairs[used]

    def _bos(self) -> tuple[int, ...]:
        """Return the token that begins every prompt, if the model has one."""
        bos = self.tokenizer.bos_token_id
        return (bos,) if self.tokenizer.add_bos and bos is not None else ()

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
