"""The compiled tree search finds what the plain one does."""

import numpy as np
import pytest

from midfill.kernels.cpu.attention_parts import AttentionParts, SelectorTable, no_parts
from midfill.kernels.cpu.kv_cache import KVCache, KVCacheDtype, LayerKV
from midfill.kernels.cpu.memory import aligned_zeros
from midfill.kernels.cpu.parts.tree_search import (
    SEARCH_ROOM,
    BlockSearch,
    rank_blocks,
    rank_score,
    search_tree,
)
from midfill.kernels.cpu.ragged_cells import HeadKeys
from midfill.runners.forward.page_selection import Search, select_from_keys
from midfill.runners.forward.tree_search import TreeRule

DIM, SLOTS = 16, 4200


def searched(query: np.ndarray, keys: np.ndarray, rule: TreeRule) -> list[int]:
    """What the kernel chooses of keys that lie anywhere in a pool."""
    cache = KVCache.allocate(KVCacheDtype.F32, SLOTS, DIM)
    slots = np.random.default_rng(9).permutation(SLOTS)[: len(keys)].astype(np.int32)
    cache.keys.reshape(SLOTS, DIM)[slots] = keys
    every = rule.search is Search.EVERY_KEY
    room = SEARCH_ROOM * (rule.candidates(len(keys)) if every else 2 * rule.blocks)
    numbers, scores = np.zeros(room + rule.blocks, np.int32), np.zeros(room, np.float32)
    nothing = np.zeros(0, np.int32)
    parts: AttentionParts = no_parts(cache.keys)._replace(
        kv_slots=slots,
        selector=SelectorTable(0, nothing, numbers, cache.keys[:0], 0, scores),
    )
    end = rule.first(len(keys))
    aligned = aligned_zeros(DIM, np.float32)
    aligned[:] = query
    head = HeadKeys(0, 0, 0, 0, False)
    search = BlockSearch(aligned, 0, 1, DIM, DIM, rule.sinks, end, rule.block)
    asked = (parts, LayerKV(cache, SLOTS, 0), head, search, rule.blocks)
    if every:
        rank_blocks(*asked, 0, 0, room)
    else:
        search_tree(*asked, int(rule.search is Search.CENTRES), 0, 0, room)
    return [end, *numbers[room:].tolist()]


@pytest.mark.parametrize("search", [Search.CENTRES, Search.FIRSTS, Search.EVERY_KEY])
@pytest.mark.parametrize("length", [600, 1000, 1023, 1024, 4097])
@pytest.mark.parametrize(("blocks", "block"), [(64, 2), (7, 3), (1, 1)])
def test_the_choice_is_that_of_the_plain_form(
    length: int, blocks: int, block: int, search: Search
) -> None:
    """Keys are whole numbers, so that many blocks score the same."""
    rule = TreeRule(blocks, block, 100, 16, search)
    rng = np.random.default_rng(length)
    query = rng.integers(-8, 9, DIM).astype(np.float32)
    keys = rng.integers(-8, 9, (length, DIM)).astype(np.float32)
    assert searched(query, keys, rule) == select_from_keys(query, keys, rule).tolist()


@pytest.mark.parametrize("seed", range(20))
def test_ranks_are_those_of_sorted_scores(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 9, 40).astype(np.float32)
    for rank in (1, 7, 20, 40):
        assert rank_score(scores.copy(), 0, 40, rank) == np.sort(scores)[::-1][rank - 1]


def test_scores_that_are_no_numbers_end_the_search_all_the_same() -> None:
    rule = TreeRule(16, 2, 10, 0)
    keys = np.full((500, DIM), np.nan, np.float32)
    found = searched(np.ones(DIM, np.float32), keys, rule)[1:]
    assert len(found) == 16
    assert min(found) >= 0
    assert max(found) < rule.candidates(500)
