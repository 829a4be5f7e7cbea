"""Nulls of methods whose rows choose pages: as many pages, chosen otherwise."""

from dataclasses import replace
from typing import Any, cast

import numpy as np

from midfill.arrays import Int32Array
from midfill.methods.sparse_decode.method import SparseDecodeMethod
from midfill.models.config import ModelConfig
from midfill.runners.forward.page_selection import PageRule


def random_pages(method: SparseDecodeMethod) -> SparseDecodeMethod:
    """Return a method whose rows read their newest page and others at random."""
    return _changed(method, page_choice=_draw)


def recent_pages(method: SparseDecodeMethod) -> SparseDecodeMethod:
    """Return a method whose rows read the last pages."""
    return _changed(method, page_choice=_last)


def whole_page_summaries(method: SparseDecodeMethod) -> SparseDecodeMethod:
    """Return a method that ranks pages by one summary each."""
    rule = method.page_rule
    return _changed(method, page_rule=replace(rule, summary=rule.page))


def _changed(method: SparseDecodeMethod, **fields: object) -> SparseDecodeMethod:
    return cast("SparseDecodeMethod", replace(cast(Any, method), **fields))


def _draw(config: ModelConfig, rule: PageRule, seen: int) -> Int32Array:
    newest = rule.newest(seen)
    scores = np.random.default_rng(seen).random((config.layers, config.query_heads, newest))
    drawn = np.argsort(scores, axis=-1)[..., : rule.pages - 1]
    return _with_newest(np.sort(drawn, axis=-1), newest)


def _last(config: ModelConfig, rule: PageRule, seen: int) -> Int32Array:
    newest = rule.newest(seen)
    last = np.arange(newest - rule.pages + 1, newest)
    return _with_newest(
        np.broadcast_to(last, (config.layers, config.query_heads, len(last))), newest
    )


def _with_newest(pages: np.ndarray, newest: int) -> Int32Array:
    first = np.full((*pages.shape[:-1], 1), newest)
    return np.concatenate((first, pages), axis=-1).astype(np.int32)
