"""Nulls of methods whose rows look sentences up: as many keys, chosen otherwise."""

from dataclasses import replace

import numpy as np

from midfill.arrays import Float32Array
from midfill.methods.sentences.method import ChosenSentences, FixedPages

PAGE = 16


def random_sentences(method: ChosenSentences) -> ChosenSentences:
    """Return a method whose rows read sentences at random, others in every row and head."""
    return replace(method, rank=_draw)


def recent_sentences(method: ChosenSentences) -> ChosenSentences:
    """Return a method whose rows read the first keys and the last ones."""
    return replace(method, rank=_last)


def fixed_pages(method: ChosenSentences) -> ChosenSentences:
    """Return a method that cuts the text into pages of 16 tokens instead of sentences."""
    return replace(method, ends=FixedPages(PAGE))


def _draw(similarities: Float32Array, position: int) -> Float32Array:
    return np.random.default_rng(position).random(similarities.shape, np.float32)


def _last(similarities: Float32Array, position: int) -> Float32Array:
    later = np.arange(similarities.shape[1], dtype=np.float32)
    found: Float32Array = np.broadcast_to(later, similarities.shape)
    return found
