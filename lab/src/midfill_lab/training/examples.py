"""Examples: infilling tasks as token ids with loss weights, tokenised in fragments, packed in rows.

Fragment tokenization follows EFIM (arXiv 2505.21889). Text is cut at random characters, every
fragment is tokenised by itself, and the ids are concatenated. A model trained on such text can
continue from half a token, wherever the caret is.

One thing is added here. The last token of a fragment is often one that the tokenizer would not
have chosen ("ret" of "return"). A model trained to predict such tokens learns to write its own
answers in broken tokens. They are therefore input only: ``broken_token_mask`` finds them.

Whole examples stand side by side in rows of bounded length; none attends to another.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from midfill.infill.cut_places import KeepsTokens
from midfill.infill.formats import FimFormat
from midfill.infill.layout import TextSegment, lay_out
from midfill.models.tokens.tokenizer import Tokenizer, keeps_tokens_of
from midfill_lab.training.holes import Hole
from midfill_lab.training.recipe import DataRecipe


def token_starts(lengths: Sequence[int], first: int = 0) -> npt.NDArray[np.int64]:
    """Return the byte at which each token starts.

    Args:
        lengths: bytes of each token.
        first: where the first token starts.
    """
    return first + np.cumsum([0, *lengths[:-1]])[: len(lengths)]


def aligned_tokens(
    starts: npt.NDArray[np.int64], others: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    """Return the pairs of tokens that start at the same byte.

    Tokens without bytes start where the next one does; of several such, the first is taken.

    Args:
        starts, others: int64 [tokens], where the tokens of either tokenization start, ascending.

    Returns:
        int32 [pairs, 2], ascending indexes into ``starts`` and ``others``.
    """
    _, first, second = np.intersect1d(starts, others, return_indices=True)
    return np.stack([first, second], axis=1).astype(np.int32)


_TYPED_CHARACTERS = (1, 8)  # typed between two requests of an editor


def draw_cuts(length: int, caret: int | None, recipe: DataRecipe, rng: random.Random) -> list[int]:
    """Draw where a text is cut: sorted positions, without both ends.

    Args:
        length: characters of the text.
        caret: position of the caret, which is always a cut; None if the text has none.
        recipe: how many further cuts to draw.
        rng: the random source.
    """
    cuts: set[int] = set() if caret is None else {caret}
    further = math.exp(rng.uniform(0, math.log(recipe.fragment_cuts + 1)))
    positions = [rng.random() for _ in range(recipe.fragment_cuts)]
    if rng.random() < recipe.fragment_share:
        cuts.update(int(position * length) for position in positions[: int(further)])
    if rng.random() < recipe.typed_share and caret is not None:
        at, first = caret, max(0, caret - recipe.typed_characters)
        while at > first:
            cuts.add(at)
            at -= rng.randint(*_TYPED_CHARACTERS)
    return sorted(cut for cut in cuts if 0 < cut < length)


def split_at(text: str, cuts: Iterable[int]) -> list[str]:
    """Split a text at sorted positions; no fragment is empty."""
    bounds = [0, *cuts, len(text)]
    return [text[a:b] for a, b in pairwise(bounds) if b > a]


def broken_token_mask(
    whole_lengths: Sequence[int], fragment_lengths: Sequence[Sequence[int]]
) -> list[bool]:
    """Return which tokens of a fragmented text exist only because of the cut after them.

    Args:
        whole_lengths: bytes of each token of the text tokenised whole.
        fragment_lengths: bytes of each token of every fragment, in order.

    Returns:
        One value per token of all fragments. True for tokens that end between a cut and the last
        boundary of the whole text's tokens before it. None do if the cut is such a boundary.
    """
    whole = [0]
    for length in whole_lengths:
        whole.append(whole[-1] + length)
    boundaries = frozenset(whole)
    mask: list[bool] = []
    at = 0
    for fragment in fragment_lengths[:-1]:
        ends = []
        for length in fragment:
            at += length
            ends.append(at)
        broken_from = at if at in boundaries else whole[bisect_right(whole, at) - 1]
        mask += [end > broken_from for end in ends]
    if fragment_lengths:
        mask += [False] * len(fragment_lengths[-1])
    return mask


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt with its answer.

    Attributes:
        ids: int32 [tokens].
        weights: float32 [tokens], loss weight of each token; 0 for tokens that are input only.
        without_end: bool [tokens], learned tokens of the prompt and the increment, at which the
            end token is excluded: the model never answers in their place.
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
        context: list[float] = [0.0] * len(bos)  # loss weights of the prompt's tokens
        starts: list[int] = []
        source = rng if fragments else None
        for segment in segments:
            if isinstance(segment, TextSegment):
                cuts = [] if source is None else self._draw_cuts(len(segment.text), None, source)
                encoded = self._encode_fragments(segment.text, cuts)
                _append(encoded, ids, starts)
                context += self._context_weights(segment.text, encoded)
            else:
                ids.append(segment.token_id)
                context.append(0.0)
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
            np.array([*context, *weights, self.recipe.end_weight], np.float32),
            np.array([*[weight > 0 for weight in context], *without_end, False]),
            hole,
            tuple(starts),
            plain,
            aligned,
        )

    def _context_weights(self, text: str, encoded: list[list[int]]) -> list[float]:
        """Return the loss weights of a prompt's text: 0 for tokens that a cut broke."""
        if not self.recipe.context_weight:
            return [0.0] * sum(map(len, encoded))
        broken, _ = self._target_masks(text, encoded, 0)
        return [0.0 if each else self.recipe.context_weight for each in broken]

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

    @classmethod
    def join(cls, rows: Sequence["PackedRow"]) -> "PackedRow":
        """Put rows one after the other."""
        bounds = _bounds([row.ids for row in rows])
        plain_bounds = _bounds([row.plain_ids for row in rows])
        starts = np.stack([bounds[:-1], plain_bounds[:-1]], axis=1)
        return cls(
            ids=np.concatenate([row.ids for row in rows]),
            weights=np.concatenate([row.weights for row in rows]),
            without_end=np.concatenate([row.without_end for row in rows]),
            cu_seqlens=_join_bounds([row.cu_seqlens for row in rows], bounds),
            characters=sum(row.characters for row in rows),
            plain_ids=np.concatenate([row.plain_ids for row in rows]),
            plain_cu_seqlens=_join_bounds([row.plain_cu_seqlens for row in rows], plain_bounds),
            aligned=np.concatenate(
                [row.aligned + start for row, start in zip(rows, starts, strict=True)]
            ),
        )

    def padded(self, tokens: int, examples: int, length: int) -> "PackedRow":
        """Return the row with examples that nothing is learned of, for one shape of all rows.

        Args:
            tokens: to have, at least as many as now.
            examples: to have; some may be empty.
            length: of an example, at most.

        Raises:
            ValueError: more tokens or examples than that.
        """
        missing = tokens - len(self.ids)
        ends = np.minimum(np.arange(length, missing + length, length), missing) + len(self.ids)
        left = examples + 1 - len(self.cu_seqlens) - len(ends)
        if missing < 0 or left < 0:
            raise ValueError(f"a row of {tokens} tokens has no room for {len(self.ids)}")
        return replace(
            self,
            ids=np.pad(self.ids, (0, missing)),
            weights=np.pad(self.weights, (0, missing)),
            without_end=np.pad(self.without_end, (0, missing)),
            cu_seqlens=np.concatenate([self.cu_seqlens, ends, [tokens] * left]).astype(np.int32),
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


def _join_bounds(
    parts: Sequence[npt.NDArray[np.int32]], starts: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """Return the bounds of all rows' examples, of the rows' own and where the rows start."""
    moved = [part[:-1] + start for part, start in zip(parts, starts, strict=False)]
    return np.concatenate([*moved, starts[-1:]])


def _positions(bounds: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return np.arange(bounds[-1], dtype=np.int32) - np.repeat(bounds[:-1], np.diff(bounds))


def _length(row: Iterable[Example]) -> int:
    return sum(len(example.ids) for example in row)
