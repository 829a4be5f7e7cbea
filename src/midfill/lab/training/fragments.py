"""Fragment tokenization: where text is cut before it is tokenised, and which tokens are learned.

Source: EFIM (arXiv 2505.21889). Text is cut at random characters, every fragment is tokenised by
itself, and the ids are concatenated. A model trained on such text can continue from half a token,
wherever the caret is.

One thing is added here. The last token of a fragment is often one that the tokenizer would not
have chosen ("ret" of "return"). A model trained to predict such tokens learns to write its own
answers in broken tokens. They are therefore input only: ``broken_token_mask`` finds them.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

from midfill.lab.training.recipe import DataRecipe

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
