"""Pages of keys that rows choose by their queries, in each layer and query head, within a step.

A head's keys are cut into *pages*, from its first key on, and a page into *summaries* of as many
keys each, which hold each channel's least and greatest number. A query's score of a page is the
most that q.k could be for any key in one of its summaries:

    max over its summaries of  sum over channels c of  max(q[c] * low[c], q[c] * high[c])

A *choice* is the newest page of the row that makes it, and the best ones before it. Later rows may
use it, too: they attend to the chosen pages and to everything from the newest one on, so that no
row misses itself or a key that came after the choice. A row that sees no more pages than are chosen
chooses all of them.
"""

from dataclasses import dataclass

import numpy as np

from midfill.arrays import BoolArray, Float32Array, Int32Array, Int64Array
from midfill.models.config import ModelConfig


@dataclass(frozen=True)
class PageRule:
    """How many keys are read, and what they are chosen by.

    Attributes:
        pages: that a row reads, its newest one included; at least 2.
        page: keys per page.
        summary: keys per summary; divides ``page``.
    """

    pages: int
    page: int = 64
    summary: int = 16

    def newest(self, seen: int) -> int:
        """Return the page of the last of ``seen`` keys."""
        return (seen - 1) // self.page

    def summaries(self, seen: int) -> int:
        """Return how many summaries a choice needs: those of the pages before the newest."""
        return self.newest(seen) * (self.page // self.summary)


@dataclass(frozen=True)
class PageSelection:
    """The choices of one request's rows in a batch.

    Attributes:
        rule: see above.
        heads: [layers, kv_heads], whose query heads choose; rows attend to all keys of the others.
        of_row: [rows] int32, which choice each row uses.
        made_by: [choices] int32, the row whose query makes a choice; -1 where it was made before.
        chosen: [choices, layers, query_heads, pages] int32: the newest page, then the others in
            order, -1 where all keys from the "newest" page on, which is then 0, are read. The step
            writes those that it makes.
        entries: [n] int32, places in the runner's memory of the first n summaries of the heads'
            keys, as many as the choices need.
        missing: [m] int32, numbers of those among them that the step writes before it reads them.
        pairs: [rows, query_heads] int64: the step adds the products of a row's query with a key,
            of all layers.
    """

    rule: PageRule
    heads: BoolArray
    of_row: Int32Array
    made_by: Int32Array
    chosen: Int32Array
    entries: Int32Array
    missing: Int32Array
    pairs: Int64Array

    def check(self, config: ModelConfig, rows: int) -> None:
        """Check that it fits a model and the rows of its request.

        Raises:
            ValueError: it doesn't.
        """
        rule, choices = self.rule, len(self.made_by)
        if rule.pages < 2 or rule.page < 1 or rule.page % max(rule.summary, 1):
            raise ValueError(f"{rule} needs at least 2 pages, of whole summaries")
        shape = (choices, config.layers, config.query_heads, rule.pages)
        if self.chosen.shape != shape or self.heads.shape != (config.layers, config.kv_heads):
            raise ValueError(f"choices of another model: {self.chosen.shape}, not {shape}")
        if len(self.of_row) != rows or self.pairs.shape != (rows, config.query_heads):
            raise ValueError(f"choices of {len(self.of_row)} rows, not {rows}")
        if self.of_row.min() < 0 or self.of_row.max() >= choices:
            raise ValueError(f"rows use choices 0 to {choices - 1}")
        made = self.made_by[self.of_row]
        if (made > np.arange(rows)).any() or self.made_by.max() >= rows:
            raise ValueError("a row can't use a choice that a later one makes")


def page_scores(query: Float32Array, lows: Float32Array, highs: Float32Array) -> Float32Array:
    """Return the most that q.k can be for keys between two bounds: [n].

    Args:
        query: [head_dim].
        lows, highs: [n, head_dim], the least and greatest number of each channel.
    """
    bounds: Float32Array = np.maximum(query * lows, query * highs).sum(axis=1)
    return bounds


def choose_pages(scores: Float32Array, rule: PageRule) -> Int32Array:
    """Return the newest page, then the best ones before it, in order: [pages] int32.

    Args:
        scores: [n], of all pages but the newest; at least as many as are chosen. Of equal ones, the
            first is better.
        rule: says how many.
    """
    best = np.argsort(-scores, kind="stable")[: rule.pages - 1]
    return np.concatenate(([len(scores)], np.sort(best))).astype(np.int32)


def all_pages(rule: PageRule) -> Int32Array:
    """Return the choice of a row that reads all of its keys: [pages] int32."""
    chosen = np.full(rule.pages, -1, np.int32)
    chosen[0] = 0
    return chosen


def chosen_keys(chosen: Int32Array, rule: PageRule, seen: int) -> BoolArray:
    """Return which of ``seen`` keys a row reads under a choice: [seen] bool."""
    listed = np.zeros(seen, bool)
    for page in chosen[1:][chosen[1:] >= 0].tolist():
        listed[page * rule.page : (page + 1) * rule.page] = True
    listed[int(chosen[0]) * rule.page :] = True
    return listed


def select_from_keys(query: Float32Array, keys: Float32Array, rule: PageRule) -> Int32Array:
    """Return what a query chooses of the keys that its row sees: the plain form, without a store.

    Args:
        query: [head_dim], rotated.
        keys: [n, head_dim], rotated, the row's own last.
        rule: how many pages, and of what size.

    Returns:
        [pages] int32, see ``PageSelection.chosen``.
    """
    newest = rule.newest(len(keys))
    if newest < rule.pages:
        return all_pages(rule)
    parts = keys[: newest * rule.page].reshape(-1, rule.summary, keys.shape[1])
    scores = page_scores(query, parts.min(axis=1), parts.max(axis=1))
    return choose_pages(scores.reshape(newest, -1).max(axis=1), rule)
