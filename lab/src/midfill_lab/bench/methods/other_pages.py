"""Nulls of methods whose rows choose pages: as many pages, chosen otherwise."""

from dataclasses import replace
from typing import Any, cast

import numpy as np

from midfill.arrays import Int32Array
from midfill.methods.sparse_decode.method import SparseDecodeMethod
from midfill.models.config import ModelConfig
from midfill.runners.forward.page_selection import PageRule, Search, SelectionRule
from midfill.runners.forward.tree_search import TreeRule


def random_pages(method: SparseDecodeMethod) -> SparseDecodeMethod:
    """Return a method whose rows read their newest page and others at random."""
    return _changed(method, page_choice=_draw)


def recent_pages(method: SparseDecodeMethod) -> SparseDecodeMethod:
    """Return a method whose rows read the last pages."""
    return _changed(method, page_choice=_last)


def whole_page_summaries(method: SparseDecodeMethod) -> SparseDecodeMethod:
    """Return a method that ranks pages by one summary each."""
    rule = method.selection_rule
    assert isinstance(rule, PageRule)
    return _changed(method, selection_rule=replace(rule, summary=rule.page))


def every_block_scored(method: SparseDecodeMethod) -> SparseDecodeMethod:
    """Return a method that scores all blocks instead of searching: no null, but its goal."""
    rule = method.selection_rule
    assert isinstance(rule, TreeRule)
    return _changed(method, selection_rule=replace(rule, search=Search.EVERY_KEY))


def whole_pages(method: SparseDecodeMethod) -> SparseDecodeMethod:
    """Return a method that reads pages by their summaries, at least as many keys as a search's."""
    rule = method.selection_rule
    assert isinstance(rule, TreeRule)
    keys = rule.sinks + rule.blocks * rule.block + rule.window
    pages = max(-(-keys // PageRule.page), 2)
    return _changed(method, selection_rule=PageRule(pages))


def _changed(method: SparseDecodeMethod, **fields: object) -> SparseDecodeMethod:
    return cast("SparseDecodeMethod", replace(cast(Any, method), **fields))


def _draw(config: ModelConfig, rule: SelectionRule, seen: int) -> Int32Array:
    shape = (config.layers, config.query_heads, rule.candidates(seen))
    scores = np.random.default_rng(seen).random(shape)
    drawn = np.argsort(scores, axis=-1)[..., : rule.width - 1]
    return _with_first(np.sort(drawn, axis=-1), rule.first(seen))


def _last(config: ModelConfig, rule: SelectionRule, seen: int) -> Int32Array:
    candidates = rule.candidates(seen)
    last = np.arange(candidates - rule.width + 1, candidates)
    return _with_first(
        np.broadcast_to(last, (config.layers, config.query_heads, len(last))), rule.first(seen)
    )


def _with_first(pages: np.ndarray, number: int) -> Int32Array:
    first = np.full((*pages.shape[:-1], 1), number)
    return np.concatenate((first, pages), axis=-1).astype(np.int32)
