"""Fragment tokenization: where text is cut before tokenising, and what may be learned of it.

Source: EFIM (arXiv 2505.21889): cut the text at random characters, tokenise each fragment by
itself, join the ids. A model trained so can go on from half a token, wherever the caret is.

One thing is added here. A fragment's last token often is one the tokenizer would not have chosen
("ret" of "return"), and a model that is trained to predict it learns to write its own answers in
broken tokens. So these tokens are read but not predicted: ``unpredictable`` tells which.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

from midfill.training.recipe import DataRecipe

_TYPED = (1, 8)  # characters between two requests of an editor


def fragment_cuts(
    length: int, caret: int | None, recipe: DataRecipe, draw: random.Random
) -> list[int]:
    """Sorted places to cut a text of ``length`` characters at, both ends left out.

    Args:
        length: of the text.
        caret: where a caret stands in it, which is always a cut; None where there is none.
        recipe: how many further cuts there are.
        draw: the random source.
    """
    cuts: set[int] = set() if caret is None else {caret}
    further = math.exp(draw.uniform(0, math.log(recipe.fragment_cuts + 1)))
    places = [draw.random() for _ in range(recipe.fragment_cuts)]
    if draw.random() < recipe.fragment_share:
        cuts.update(int(place * length) for place in places[: int(further)])
    if draw.random() < recipe.typed_share and caret is not None:
        at, first = caret, max(0, caret - recipe.typed_characters)
        while at > first:
            cuts.add(at)
            at -= draw.randint(*_TYPED)
    return sorted(cut for cut in cuts if 0 < cut < length)


def pieces_of(text: str, cuts: Iterable[int]) -> list[str]:
    """The text cut at sorted places; no piece is empty."""
    bounds = [0, *cuts, len(text)]
    return [text[a:b] for a, b in pairwise(bounds) if b > a]


def unpredictable(
    natural_lengths: Sequence[int], piece_lengths: Sequence[Sequence[int]]
) -> list[bool]:
    """Which tokens of a fragmented text only exist because of a cut behind them.

    Args:
        natural_lengths: bytes of each token of the text tokenised as a whole.
        piece_lengths: bytes of each token of every piece, in order.

    Returns:
        One value a token of all pieces: True for those that reach beyond the last natural
        boundary before a cut, up to that cut, unless the cut is a natural boundary itself.
    """
    natural = [0]
    for length in natural_lengths:
        natural.append(natural[-1] + length)
    boundaries = frozenset(natural)
    marks: list[bool] = []
    at = 0
    for piece in piece_lengths[:-1]:
        ends = []
        for length in piece:
            at += length
            ends.append(at)
        broken_from = at if at in boundaries else natural[bisect_right(natural, at) - 1]
        marks += [end > broken_from for end in ends]
    if piece_lengths:
        marks += [False] * len(piece_lengths[-1])
    return marks
