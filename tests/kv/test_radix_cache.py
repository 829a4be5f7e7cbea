"""RadixCache: finds the longest cached prefix, protects locked paths, evicts by last use."""

import numpy as np
import pytest

from midfill.arrays import Int32Array
from midfill.kv.radix_cache import RadixCache


def ints(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def span(start: int, count: int) -> Int32Array:
    return np.arange(start, start + count, dtype=np.int32)


def test_an_empty_cache_matches_nothing() -> None:
    cache = RadixCache()
    found = cache.match("", ints(1, 2, 3))
    assert len(found) == 0
    assert found.node is None
    assert cache.tenants == 0


def test_matches_end_at_any_token() -> None:
    cache = RadixCache()
    cache.insert("", ints(1, 2, 3, 4, 5), ints(10, 11, 12, 13, 14))
    assert cache.match("", ints(1, 2, 3, 9)).slots.tolist() == [10, 11, 12]
    assert cache.match("", ints(1, 2, 3, 4, 5, 6)).slots.tolist() == [10, 11, 12, 13, 14]
    assert cache.match("", ints(1)).slots.tolist() == [10]
    assert cache.match("", ints(2, 3)).slots.tolist() == []


def test_branches_share_their_common_part() -> None:
    cache = RadixCache()
    cache.insert("", ints(1, 2, 3, 4), ints(10, 11, 12, 13))
    added = cache.insert("", ints(1, 2, 7, 8), ints(20, 21, 22, 23))
    assert added.slots.tolist() == [10, 11, 22, 23]
    assert added.duplicates.tolist() == [20, 21]
    assert cache.cached_tokens == 6
    assert cache.match("", ints(1, 2, 3, 4)).slots.tolist() == [10, 11, 12, 13]


def test_slots_that_were_matched_before_are_no_duplicates() -> None:
    cache = RadixCache()
    cache.insert("", ints(1, 2), ints(10, 11))
    added = cache.insert("", ints(1, 2, 3), ints(10, 11, 12))
    assert added.duplicates.tolist() == []
    assert cache.cached_tokens == 3


def test_tenants_never_see_each_other() -> None:
    cache = RadixCache()
    cache.insert("ann", ints(1, 2, 3), ints(10, 11, 12))
    assert len(cache.match("bob", ints(1, 2, 3))) == 0
    assert cache.insert("bob", ints(1, 2, 3), ints(20, 21, 22)).duplicates.tolist() == []
    assert cache.match("ann", ints(1, 2, 3)).slots.tolist() == [10, 11, 12]
    assert cache.tenants == 2


def test_a_tenant_with_nothing_cached_is_forgotten() -> None:
    cache = RadixCache()
    cache.insert("ann", ints(1, 2), ints(10, 11))
    cache.match("bob", ints(1))
    cache.evict(2)
    assert cache.tenants == 0


def test_the_least_recently_used_leaf_is_evicted_first_from_its_end() -> None:
    cache = RadixCache()
    cache.insert("", ints(1, 2, 3), ints(10, 11, 12))
    cache.insert("", ints(5, 6, 7), ints(20, 21, 22))
    cache.match("", ints(1, 2, 3))
    assert cache.evict(2).tolist() == [21, 22]
    assert cache.match("", ints(5, 6, 7)).slots.tolist() == [20]
    cache.match("", ints(1, 2, 3))
    assert sorted(cache.evict(2).tolist()) == [12, 20]


def test_a_locked_path_stays_while_its_children_are_evicted() -> None:
    cache = RadixCache()
    cache.insert("", ints(1, 2, 3, 4), ints(10, 11, 12, 13))
    held = cache.match("", ints(1, 2)).node
    cache.lock(held)
    assert cache.evictable_tokens == 2
    assert sorted(cache.evict(100).tolist()) == [12, 13]
    assert cache.match("", ints(1, 2, 3)).slots.tolist() == [10, 11]
    cache.unlock(held)
    assert sorted(cache.evict(100).tolist()) == [10, 11]


def test_locks_count() -> None:
    cache = RadixCache()
    node = cache.insert("", ints(1, 2), ints(10, 11)).node
    cache.lock(node)
    cache.lock(node)
    cache.unlock(node)
    assert cache.evict(2).tolist() == []
    cache.unlock(node)
    assert cache.evictable_tokens == 2
    with pytest.raises(ValueError, match="not locked"):
        cache.unlock(node)


def test_a_handle_survives_the_splitting_of_its_node() -> None:
    cache = RadixCache()
    node = cache.insert("", ints(1, 2, 3, 4), ints(10, 11, 12, 13)).node
    cache.lock(node)
    cache.insert("", ints(1, 2, 9), ints(10, 11, 14))
    assert cache.evict(100).tolist() == [14]
    cache.unlock(node)
    assert sorted(cache.evict(100).tolist()) == [10, 11, 12, 13]


def test_released_by_counts_the_tokens_that_only_these_locks_protect() -> None:
    cache = RadixCache()
    first = cache.insert("", ints(1, 2, 3), ints(10, 11, 12)).node
    second = cache.insert("", ints(1, 2, 4, 5), ints(10, 11, 13, 14)).node
    cache.lock(first)
    cache.lock(second)
    assert cache.released_by([first]) == 1
    assert cache.released_by([second]) == 2
    assert cache.released_by([first, second]) == 5
    assert cache.released_by([None]) == 0


def test_peek_measures_and_changes_nothing() -> None:
    cache = RadixCache()
    cache.insert("", ints(1, 2, 3), ints(10, 11, 12))
    cache.insert("", ints(5, 6), ints(20, 21))
    cache.lock(cache.match("", ints(1)).node)
    assert cache.peek("", ints(1, 2, 9)) == (2, 1)
    # Had peek counted as use, 5 6 would be the oldest now.
    cache.match("", ints(5, 6))
    cache.peek("", ints(1, 2, 3))
    assert cache.evict(1).tolist() == [12]


def test_a_prompt_inserted_chunk_by_chunk_stays_one_node() -> None:
    cache = RadixCache()
    tokens, slots = span(100, 64), span(0, 64)
    held = None
    for end in range(8, 65, 8):
        node = cache.insert("", tokens[:end], slots[:end], held).node
        if node is not held:
            cache.lock(node)
            cache.unlock(held)
            held = node
    assert held is not None
    assert len(held.tokens) == 64
    assert cache.evictable_tokens == 0
    cache.unlock(held)
    assert cache.evictable_tokens == 64


def test_a_leaf_with_another_lock_does_not_grow_in_place() -> None:
    cache = RadixCache()
    mine = cache.insert("", ints(1, 2), ints(10, 11)).node
    cache.lock(mine)
    cache.lock(mine)
    longer = cache.insert("", ints(1, 2, 3), ints(10, 11, 12), held=mine).node
    assert longer is not mine
    assert cache.evictable_tokens == 1


def test_a_large_cache_matches_every_branch_and_evicts_down_to_the_shared_prefix() -> None:
    # 3,000 branches off a shared prefix of 2,000 tokens, 110,000 tokens in all.
    cache = RadixCache()
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 50_000, 2000).astype(np.int32)
    prompts = []
    for branch in range(3000):
        tail = rng.integers(0, 50_000, 36).astype(np.int32)
        prompt = np.concatenate((shared, tail))
        cache.insert("", prompt, span(branch * 2036, 2036))
        prompts.append(prompt)
    for prompt in prompts:
        assert len(cache.match("", prompt)) == 2036
    while cache.cached_tokens > 2000:
        cache.evict(min(100, cache.cached_tokens - 2000))
    assert len(cache.match("", shared)) == 2000


def test_what_only_offline_requests_have_used_is_evicted_first() -> None:
    cache = RadixCache()
    cache.insert("", ints(1, 2), ints(10, 11))
    cache.insert("", ints(3, 4), ints(12, 13), low_priority=True)
    cache.match("", ints(3, 4), low_priority=True)
    assert sorted(cache.evict(2).tolist()) == [12, 13]
    assert sorted(cache.evict(2).tolist()) == [10, 11]


def test_what_others_use_too_is_no_longer_of_low_priority() -> None:
    cache = RadixCache()
    cache.insert("", ints(1, 2, 3, 4), ints(10, 11, 12, 13), low_priority=True)
    cache.match("", ints(1, 2))
    cache.insert("", ints(7, 8), ints(20, 21))
    cache.match("", ints(1, 2, 3, 4), low_priority=True)
    assert sorted(cache.evict(2).tolist()) == [12, 13]
    assert sorted(cache.evict(2).tolist()) == [20, 21]


def test_an_offline_request_makes_nothing_of_low_priority_that_it_continues() -> None:
    cache = RadixCache()
    document = cache.insert("", ints(1, 2), ints(10, 11)).node
    cache.lock(document)
    row = cache.insert("", ints(1, 2, 3), ints(10, 11, 12), document, low_priority=True)
    assert row.node is not document
    cache.unlock(document)
    cache.insert("", ints(7), ints(20))
    assert cache.evict(1).tolist() == [12]
    assert sorted(cache.evict(2).tolist()) == [10, 11]
