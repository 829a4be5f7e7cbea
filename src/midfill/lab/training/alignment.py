"""Alignment: tokens of two tokenizations of one text that start at the same byte."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


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
