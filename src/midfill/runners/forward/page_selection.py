"""Pages of keys that rows choose by their queries, in each layer and query head, within a step.

A head's keys are cut into *pages*, from its first key on, and a page into *summaries* of as many
keys each, which hold each channel's least and greatest number. A query's score of a page is the
most that q.k could be for any key in one of its summaries:

    max over its summaries of  sum over channels c of  max(q[c] * low[c], q[c] * high[c])

A *choice* is the newest page of the row that makes it, and the best ones before it. Later rows may
use it, too: they attend to the chosen pages and to everything from the newest one on, so that no
row misses itself or a key that came after the choice. A row that sees no more pages than are chosen
chooses all of them.

A tree search chooses otherwise, of smaller blocks without summaries (``tree_search``). What the two
have in common is a ``SelectionRule``: the rest of a step's machinery knows no more of them.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import numpy as np

from midfill.arrays import BoolArray, Float32Array, Int32Array, Int64Array
from midfill.models.config import ModelConfig


class Search(Enum):
    """How a query finds the pages that it takes: among their summaries, or by keys themselves."""

    SUMMARIES = auto()
    """All pages are scored by their summaries."""
    CENTRES = auto()
    """A tree search, whose nodes are scored by the block at their centre."""
    FIRSTS = auto()
    """A tree search, whose nodes are scored by their first block."""
    EVERY_KEY = auto()
    """All blocks are scored, each by the best of its keys."""


class SelectionRule(Protocol):
    """How rows choose among pages or blocks of keys, called pages here, and what they then read.

    A choice is ``width`` numbers: first where that begins which rows read without choosing it, then
    the chosen pages in order.
    """

    @property
    def width(self) -> int:
        """How many numbers a choice has; as many pages less one are chosen."""

    @property
    def spans(self) -> int:
        """The most spans of keys that a row reads."""

    @property
    def search(self) -> Search:
        """How pages are found."""

    @property
    def page(self) -> int:
        """Keys per page."""

    @property
    def sinks(self) -> int:
        """First keys that all rows read; pages follow them."""

    @property
    def window(self) -> int:
        """Last keys that all rows read; 0 where it is the newest page instead."""

    @property
    def summary(self) -> int:
        """Keys per summary; 0 where keys are not summarised."""

    def check(self) -> None:
        """Check that it makes sense.

        Raises:
            ValueError: it doesn't.
        """

    def first(self, seen: int) -> int:
        """Return the first number of a choice by a row that sees so many keys."""

    def candidates(self, seen: int) -> int:
        """Return how many pages such a row chooses from; all keys are read if it takes them all."""

    def summaries(self, seen: int) -> int:
        """Return how many summaries such a row's choice needs."""

    def tail(self, first: int) -> int:
        """Return the key from which on all are read, by the first number of a choice."""

    def span(self, number: int) -> tuple[int, int]:
        """Return a page's first key and the one after its last."""

    def choose(self, query: Float32Array, keys: Float32Array) -> Int32Array:
        """Return what a query chooses where there are more pages than it takes: the plain form.

        Args:
            query: [head_dim], rotated.
            keys: [n, head_dim], rotated, the row's own last.

        Returns:
            [width] int32.
        """


@dataclass(frozen=True)
class PageRule:
    """How many keys are read, and what they are chosen by; implements ``SelectionRule``.

    Attributes:
        pages: that a row reads, its newest one included; at least 2.
        page: keys per page.
        summary: keys per summary; divides ``page``.
    """

    pages: int
    page: int = 64
    summary: int = 16

    @property
    def width(self) -> int:
        """See ``SelectionRule``: the newest page, and the others."""
        return self.pages

    @property
    def spans(self) -> int:
        """See ``SelectionRule``."""
        return self.pages

    @property
    def search(self) -> Search:
        """See ``SelectionRule``."""
        return Search.SUMMARIES

    @property
    def sinks(self) -> int:
        """See ``SelectionRule``: none."""
        return 0

    @property
    def window(self) -> int:
        """See ``SelectionRule``: the newest page."""
        return 0

    def check(self) -> None:
        """See ``SelectionRule``."""
        if self.pages < 2 or self.page < 1 or self.page % max(self.summary, 1):
            raise ValueError(f"{self} needs at least 2 pages, of whole summaries")

    def newest(self, seen: int) -> int:
        """Return the page of the last of ``seen`` keys."""
        return (seen - 1) // self.page

    def first(self, seen: int) -> int:
        """See ``SelectionRule``: the newest page."""
        return self.newest(seen)

    def candidates(self, seen: int) -> int:
        """See ``SelectionRule``: the pages before the newest."""
        return self.newest(seen)

    def summaries(self, seen: int) -> int:
        """See ``SelectionRule``: those of the pages before the newest."""
        return self.newest(seen) * (self.page // self.summary)

    def tail(self, first: int) -> int:
        """See ``SelectionRule``."""
        return first * self.page

    def span(self, number: int) -> tuple[int, int]:
        """See ``SelectionRule``."""
        return number * self.page, (number + 1) * self.page

    def choose(self, query: Float32Array, keys: Float32Array) -> Int32Array:
        """See ``SelectionRule``."""
        newest = self.newest(len(keys))
        parts = keys[: newest * self.page].reshape(-1, self.summary, keys.shape[1])
        scores = page_scores(query, parts.min(axis=1), parts.max(axis=1))
        return choose_pages(scores.reshape(newest, -1).max(axis=1), self)


@dataclass(frozen=True)
class PageSelection:
    """The choices of one request's rows in a batch.

    Attributes:
        rule: see above.
        heads: [layers, kv_heads], whose query heads choose; rows attend to all keys of the others.
        of_row: [rows] int32, which choice each row uses.
        made_by: [choices] int32, the row whose query makes a choice; -1 where it was made before.
        chosen: [choices, layers, query_heads, width] int32, see ``SelectionRule``; 0 and then -1
            where all keys are read. The step writes those that it makes.
        entries: [n] int32, places in the runner's memory of the first n summaries of the heads'
            keys, as many as the choices need; none where the rule has no summaries.
        missing: [m] int32, numbers of those among them that the step writes before it reads them.
        pairs: [rows, query_heads] int64: the step adds the products of a row's query with a key,
            of all layers.
    """

    rule: SelectionRule
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
        rule.check()
        shape = (choices, config.layers, config.query_heads, rule.width)
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


def reads_all(rule: SelectionRule, seen: int) -> bool:
    """Return whether a row that sees so many keys reads all of them."""
    return rule.candidates(seen) < rule.width


def all_pages(rule: SelectionRule) -> Int32Array:
    """Return the choice of a row that reads all of its keys: [width] int32."""
    chosen = np.full(rule.width, -1, np.int32)
    chosen[0] = 0
    return chosen


def chosen_keys(chosen: Int32Array, rule: SelectionRule, seen: int) -> BoolArray:
    """Return which of ``seen`` keys a row reads under a choice: [seen] bool."""
    listed = np.zeros(seen, bool)
    listed[: rule.sinks] = True
    for page in chosen[1:][chosen[1:] >= 0].tolist():
        start, end = rule.span(page)
        listed[start:end] = True
    listed[rule.tail(int(chosen[0])) :] = True
    return listed


def select_from_keys(query: Float32Array, keys: Float32Array, rule: SelectionRule) -> Int32Array:
    """Return what a query chooses of the keys that its row sees: the plain form, without a store.

    Args:
        query: [head_dim], rotated.
        keys: [n, head_dim], rotated, the row's own last.
        rule: says how.

    Returns:
        [width] int32, see ``PageSelection.chosen``.
    """
    return all_pages(rule) if reads_all(rule, len(keys)) else rule.choose(query, keys)
