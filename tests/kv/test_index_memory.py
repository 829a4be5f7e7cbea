"""The prefix cache's trees take a bounded memory, and no more than is counted."""

import random
import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from midfill.arrays import Int32Array
from midfill.kv.pool import KVPool
from midfill.kv.radix_cache import RadixCache

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=12)


def array(values: list[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)


def insert(pool: KVPool, tokens: list[int]) -> None:
    """Cache a text's KV as a sequence does that has computed it."""
    slots = pool.allocate(len(tokens))
    pool.slots.free(pool.cache.insert("", array(tokens), slots).duplicates)


def count_nodes(cache: RadixCache) -> int:
    """Count the nodes one by one."""
    stack = list(cache._roots.values())
    count = -len(stack)
    while stack:
        count += 1
        stack += stack.pop().children.values()
    return count


@given(TEXTS, st.lists(st.integers(0, 20), max_size=4))
def test_nodes_are_counted(texts: list[list[int]], evictions: list[int]) -> None:
    pool = KVPool(200)
    for text in texts:
        insert(pool, text)
    assert pool.cache.nodes == count_nodes(pool.cache)
    for eviction in evictions:
        pool.slots.free(pool.cache.evict(eviction))
        assert pool.cache.nodes == count_nodes(pool.cache)


@given(TEXTS, st.integers(0, 10))
def test_a_pool_is_trimmed_to_its_maximum_of_nodes(texts: list[list[int]], maximum: int) -> None:
    pool = KVPool(200)
    pool.max_nodes = maximum
    for text in texts:
        insert(pool, text)
    pool.trim()
    assert pool.cache.nodes == count_nodes(pool.cache) <= maximum
    assert pool.slots.free_slots + pool.cache.cached_tokens == 200
    assert pool.cache.evictable_tokens == pool.cache.cached_tokens


def test_what_was_used_last_stays() -> None:
    pool = KVPool(200)
    pool.max_nodes = 2
    for first in range(5):
        insert(pool, [first] * 10)
    pool.cache.match("", array([1] * 10))
    pool.trim()
    cached = [pool.cache.peek("", array([first] * 10)).tokens for first in range(5)]
    assert cached == [0, 10, 0, 0, 10]


def test_locked_paths_stay() -> None:
    pool = KVPool(200)
    pool.max_nodes = 0
    insert(pool, [1] * 10)
    insert(pool, [2] * 10)
    match = pool.cache.match("", array([1] * 10))
    pool.cache.lock(match.node)
    pool.trim()
    assert pool.cache.nodes == 1
    assert pool.cache.peek("", array([1] * 10)).tokens == 10
    pool.cache.unlock(match.node)
    pool.trim()
    assert pool.cache.nodes == 0
    assert pool.slots.free_slots == 200


def test_the_counted_memory_is_no_less_than_what_is_taken() -> None:
    chance = random.Random(0)
    texts = [[chance.randrange(3) for _ in range(14)] for _ in range(3000)]
    pool = KVPool(40_000)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for text in texts:
            insert(pool, text)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert pool.cache.nodes > 3000
    taken = after - before
    assert taken <= pool.index_bytes <= 2.5 * taken
