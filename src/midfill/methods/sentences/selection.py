"""Which keys a row reads when it looks sentences up by their mean keys; numbers only, no state.

A *head* is a layer's KV head here: there are layers * kv_heads of them. The keys that a head holds
are numbered from 0 on, in the order of their positions: those that it retains of the prompt, then
the answer's. All heads hold equally many. A sentence is a range of a head's numbers, and its ranges
follow one another; one of which nothing was retained is empty.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from midfill.arrays import BoolArray, Float32Array, Int32Array, Int64Array
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.evict.window_attention import (
    group_mean,
    max_pool,
    top_keys,
    window_attention,
)

_ENDS = frozenset(
    (".", "!", "?", ". ", "! ", "? ", "...", "\n\n", "\n\n\n", "\u3002", "\uff01", "\uff1f")
)
"""Tokens that end a sentence, once a space before them is left out; the last three are those of
Chinese and Japanese text."""


@dataclass(frozen=True)
class SentenceRule:
    """How many keys are retained and read.

    Attributes:
        budget: keys that a row reads.
        retained: of a prompt in each head.
        start, recent: first and last keys that every row reads, its own among the last.
        window: the prompt's last rows, which vote for what is retained.
        kernel: width of the pooling of votes.
        warmup: a sentence's first rows, for which it has no query of its own yet.
        reads_all: whether these rows read all keys; otherwise they choose by the last query.
    """

    budget: int
    retained: int
    start: int = 32
    recent: int = 32
    window: int = 32
    kernel: int = 7
    warmup: int = 1
    reads_all: bool = False

    def places(self, keys: int) -> int:
        """Return the largest number of keys that a row reads, given how many there are."""
        return keys if self.reads_all else min(keys, self.budget)


def end_tokens(token_bytes: Callable[[int], bytes], vocab: int, *, lines: bool) -> BoolArray:
    """Return which tokens end a sentence: [vocab] bool.

    Every id is decoded, since vocabularies spell spaces and newlines in their own ways.

    Args:
        token_bytes: returns what a token stands for.
        vocab: how many tokens there are.
        lines: whether lines take the place of sentences: tokens with a newline end one.
    """
    texts = (token_bytes(token).decode("utf-8", errors="replace") for token in range(vocab))
    if lines:
        return np.fromiter(("\n" in text for text in texts), bool, vocab)
    return np.fromiter((text.removeprefix(" ") in _ENDS for text in texts), bool, vocab)


def retained_keys(keys: SequenceKeys, queries: Float32Array, rule: SentenceRule) -> Int32Array:
    """Return what each head retains of a prompt, ascending: [heads, n] int32.

    The last rows are retained, and of the others those that these attend to most, their neighbours
    included. Query heads that share a KV head vote together (mean).

    Args:
        keys: of the prompt.
        queries: float32 [layers, rows, query_heads, head_dim], rotated: of the last rows.
        rule: says how many.
    """
    count, config = int(keys.counts[0]), keys.config
    if count <= max(rule.retained, rule.window):
        return np.broadcast_to(np.arange(count, dtype=np.int32), (keys.heads, count)).copy()
    window = np.arange(count - rule.window, count, dtype=np.int32)
    found = []
    for layer in range(config.layers):
        votes = window_attention(keys, queries, layer)[:, :, : -rule.window].sum(axis=1)
        for scores in group_mean(max_pool(votes, rule.kernel), config.kv_heads):
            best = np.sort(top_keys(scores, rule.retained - rule.window))
            found.append(np.concatenate((best, window)))
    return np.stack(found)


def sentence_bounds(ends: BoolArray, positions: Int32Array) -> Int32Array:
    """Return where each head's sentences begin, and where the last one ends.

    Args:
        ends: [tokens] bool, whether a token ends a sentence; what follows the last end is one, too.
        positions: [heads, n] int32, ascending: the tokens whose keys a head holds.

    Returns:
        [heads, sentences + 1] int32, numbers of keys, ascending from 0 to n.
    """
    before: Int64Array = np.cumsum(ends, dtype=np.int64) - ends.astype(np.int64)
    sentences = int(before[-1]) + 1
    heads = len(positions)
    counts = np.zeros((heads, sentences + 1), np.int32)
    place = np.arange(heads)[:, None] * (sentences + 1) + before[positions] + 1
    counts.reshape(-1)[:] = np.bincount(place.reshape(-1), minlength=counts.size)
    return np.cumsum(counts, axis=1, dtype=np.int32)


def mean_keys(keys: Float32Array, bounds: Int32Array) -> Float32Array:
    """Return the mean of each of a head's sentences, 0 for an empty one: [sentences, head_dim].

    Args:
        keys: [n, head_dim].
        bounds: [sentences + 1] int32, from 0 to n.
    """
    counts = np.diff(bounds)
    means = np.zeros((len(counts), keys.shape[1]), np.float32)
    filled = counts > 0
    sums = np.add.reduceat(keys, bounds[:-1][filled], axis=0, dtype=np.float64)
    means[filled] = sums / counts[filled, None]
    return means


def similarities(means: Float32Array, query: Float32Array) -> Float32Array:
    """Return how well sentences suit a query: [heads, sentences].

    Args:
        means: [heads, sentences, head_dim].
        query: [heads, head_dim], the sum over the query heads that share a KV head.
    """
    found: Float32Array = np.matmul(means, query[:, :, None])[:, :, 0]
    return found


def chosen_keys(
    scores: Float32Array, bounds: Int32Array, keys: int, rule: SentenceRule
) -> BoolArray:
    """Return which of its keys each head's row reads: [heads, keys] bool.

    Besides the first and the last ones, these are the keys of the best sentences, of each in order,
    until ``rule.budget`` keys are read; the last sentence may be cut. The sentence being written
    is none of them yet.

    Args:
        scores: [heads, sentences]; of equal ones, the first is better.
        bounds: [heads, sentences + 1] int32, see ``sentence_bounds``.
        keys: how many there are, the row's own included.
        rule: says how many are read.
    """
    heads = len(bounds)
    if keys <= rule.budget:
        return np.ones((heads, keys), bool)
    edges = np.zeros((heads, keys + 1), np.int32)
    first, last = rule.start, keys - rule.recent
    starts, ends = np.clip(bounds[:, :-1], first, last), np.clip(bounds[:, 1:], first, last)
    order = np.argsort(-scores, axis=1, kind="stable")
    starts, counts = (np.take_along_axis(part, order, axis=1) for part in (starts, ends - starts))
    left = rule.budget - rule.start - rule.recent - (np.cumsum(counts, axis=1) - counts)
    taken = np.clip(left, 0, counts)
    head = np.broadcast_to(np.arange(heads)[:, None], starts.shape)
    np.add.at(edges, (head, starts), 1)
    np.add.at(edges, (head, starts + taken), -1)
    edges[:, 0] += rule.start > 0
    edges[:, first] -= rule.start > 0
    edges[:, last] += 1
    return np.cumsum(edges[:, :-1], axis=1) > 0
