"""Spans of a prompt that stand anywhere in cached text, against a search that tries every place."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.arrays import Int32Array
from midfill.kv import donor_index
from midfill.kv.donor_index import DonorIndex
from midfill.kv.pool import KVPool
from midfill.kv.radix_cache import BranchRoot, CacheRoot

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=30)  # few, so that they repeat
TENANTS = st.sampled_from(["ann", "ann", "bob"])
INSERTED = st.tuples(st.just("insert"), TENANTS, TOKENS)
GROWN = st.tuples(st.just("grow"), TENANTS, TOKENS)
EVICTED = st.tuples(st.just("evict"), st.integers(1, 40), st.none())
FOUND = st.tuples(st.just("find"), TENANTS, TOKENS)
STEPS = st.lists(st.one_of(INSERTED, INSERTED, GROWN, EVICTED, FOUND), max_size=25)


def ids(tokens: list[int]) -> Int32Array:
    return np.array(tokens, np.int32)


@dataclass
class Cached:
    """A cache, its index, and every text that was ever put there."""

    pool: KVPool
    index: DonorIndex
    texts: list[tuple[CacheRoot, list[int]]] = field(default_factory=list)

    @classmethod
    def new(cls, slots: int = 400) -> "Cached":
        cached = cls(KVPool(slots), DonorIndex(slots))
        cached.pool.cache.watch(cached.index)
        return cached

    def insert(self, root: CacheRoot, tokens: list[int]) -> None:
        slots = self.pool.allocate(len(tokens))
        stored = self.pool.cache.insert(root, ids(tokens), slots)
        self.pool.slots.free(stored.duplicates)
        self.texts.append((root, tokens))

    def evict(self, count: int) -> None:
        self.pool.slots.free(self.pool.cache.evict(count))

    def there(self, root: CacheRoot) -> list[tuple[list[int], list[int]]]:
        """What is left of the texts, with the slots that the cache itself says."""
        found = []
        for owner, tokens in self.texts:
            if owner == root:
                slots = self.pool.cache.find(root, ids(tokens)).tolist()
                found.append((tokens[: len(slots)], slots))
        return found


def longest_at(cached: Cached, root: CacheRoot, tokens: list[int], at: int) -> int:
    most = 0
    for text, _ in cached.there(root):
        for place in range(1, len(text)):
            length = 0
            while (
                at + length < len(tokens)
                and place + length < len(text)
                and tokens[at + length] == text[place + length]
            ):
                length += 1
            most = max(most, length)
    return most


def naive_spans(
    cached: Cached, root: CacheRoot, tokens: list[int], start: int, least: int
) -> list[tuple[int, int]]:
    spans, at = [], max(start, 1)
    while at < len(tokens):
        length = longest_at(cached, root, tokens, at)
        if length >= least:
            spans.append((at, length))
        at += length if length >= least else 1
    return spans


def check_copies(cached: Cached, root: CacheRoot, tokens: list[int], start: int, least: int) -> int:
    """Check that whatever is found stands where it is said to; return how many tokens that is."""
    at = max(start, 1)
    spans = cached.index.find(root, ids(tokens), start, least)
    for span in spans:
        assert span.start >= at, "spans overlap"
        assert span.length >= least
        at = span.end
        assert any(
            slots[span.position : span.position + span.length] == span.slots.tolist()
            and text[span.position : span.position + span.length] == tokens[span.start : span.end]
            for text, slots in cached.there(root)
        )
        assert span.position >= 1
        assert span.shift == span.start - span.position
    return sum(span.length for span in spans)


@contextmanager
def patched(**values: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(donor_index, name, value)
        yield


@pytest.mark.parametrize("factor", [int(donor_index._FACTOR), 2**62, 0], ids=["", "few", "one"])
@given(steps=STEPS, start=st.integers(0, 4), least=st.integers(1, 9))
@settings(max_examples=120, deadline=None)
def test_finds_what_a_search_of_every_place_finds(
    factor: int, steps: list[tuple[str, object, object]], start: int, least: int
) -> None:
    """Whatever was cached and evicted, and if few hashes, or one, stand for all windows."""
    cached = Cached.new()
    with patched(_FACTOR=np.uint64(factor), _MAX_PLACES=10_000):
        for what, first, tokens in [*steps, ("find", "ann", [0, 1, 2, 3] * 4)]:
            if what == "evict":
                cached.evict(first)
            elif what == "insert":
                cached.insert(first, tokens)
            elif what == "grow":
                before = [text for owner, text in cached.texts if owner == first]
                cached.insert(first, [*before[-1], *tokens] if before else tokens)
            else:
                found = cached.index.find(first, ids(tokens), start, least)
                expected = naive_spans(cached, first, tokens, start, least)
                assert [(span.start, span.length) for span in found] == expected
                check_copies(cached, first, tokens, start, least)


@given(texts=st.lists(TOKENS, min_size=1, max_size=8), tokens=TOKENS, least=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_where_too_many_places_collide_nothing_wrong_is_found(
    texts: list[list[int]], tokens: list[int], least: int
) -> None:
    cached = Cached.new()
    with patched(_FACTOR=np.uint64(0), _MAX_PLACES=2):
        for text in texts:
            cached.insert("ann", text)
        check_copies(cached, "ann", tokens, 0, least)


@given(steps=STEPS)
@settings(max_examples=60, deadline=None)
def test_an_index_that_comes_late_knows_what_is_cached(
    steps: list[tuple[str, object, object]],
) -> None:
    early = Cached.new()
    for what, first, tokens in steps:
        if what == "evict":
            early.evict(first)
        elif what != "find":
            early.insert(first, tokens)
    late = DonorIndex(400)
    early.pool.cache.watch(late)
    for tenant in ("ann", "bob"):
        for tokens in ([0, 1, 2, 3] * 3, [1, 1, 1, 1], [3, 2, 1]):
            one, other = (index.find(tenant, ids(tokens), 0, 2) for index in (early.index, late))
            assert [span.start for span in one] == [span.start for span in other]


@given(steps=STEPS)
@settings(max_examples=60, deadline=None)
def test_texts_through_a_token_are_cached_texts(steps: list[tuple[str, object, object]]) -> None:
    cached = Cached.new()
    for what, first, tokens in steps:
        if what == "evict":
            cached.evict(first)
        elif what != "find":
            cached.insert(first, tokens)
        for tenant in ("ann", "bob"):
            for text, slots in cached.there(tenant):
                for place, slot in enumerate(slots):
                    whole = cached.index.text_through(slot)
                    assert whole.tokens[: place + 1].tolist() == text[: place + 1]
                    assert whole.slots[: place + 1].tolist() == slots[: place + 1]
                    assert cached.index.root_of(slot) == tenant
                    known = cached.pool.cache.find(tenant, whole.tokens)
                    assert known.tolist() == whole.slots.tolist()
                    ending = cached.index.text_ending(slot, min(place + 1, 3))
                    assert ending is not None
                    assert ending.tokens.tolist() == text[: place + 1][-3:]
                    assert cached.index.text_ending(slot, place + 2) is None


def test_text_that_was_cached_last_counts_of_equal_ones() -> None:
    cached = Cached.new()
    for first in (7, 8, 9):
        cached.insert("ann", [first, *range(20, 40)])
    (span,) = cached.index.find("ann", ids([1, *range(20, 40)]), 0, 8)
    assert span.slots.tolist() == cached.there("ann")[-1][1][1:]


def test_another_tenants_text_is_not_found_nor_what_is_not_exact() -> None:
    cached = Cached.new()
    cached.insert("bob", [1, *range(20, 40)])
    cached.insert(BranchRoot("ann", "blend", 1), [1, *range(20, 40)])
    assert cached.index.find("ann", ids([2, *range(20, 40)]), 0, 4) == []


def test_a_stamp_tells_a_token_from_later_ones_in_its_slot() -> None:
    cached = Cached.new(20)
    cached.insert("ann", [5] * 20)
    slot = cached.there("ann")[0][1][3]
    stamp = cached.index.stamp(slot)
    assert stamp > 0
    cached.evict(20)
    assert cached.index.stamp(slot) == 0
    cached.insert("ann", [5] * 20)
    assert cached.index.stamp(slot) not in (0, stamp)


def test_a_prompt_of_one_token_and_spans_of_one_token() -> None:
    cached = Cached.new()
    cached.insert("ann", [1, 7])
    assert cached.index.find("ann", ids([7]), 0, 1) == []
    (span,) = cached.index.find("ann", ids([3, 7]), 0, 1)
    assert (span.start, span.length, span.position) == (1, 1, 1)
    assert cached.index.find("ann", ids([3, 7]), 0, 2) == []


def test_a_token_repeated_for_long_takes_little_and_is_all_found() -> None:
    cached = Cached.new(9001)
    cached.insert("ann", [1] + [7] * 9000)
    spans = cached.index.find("ann", ids([1] + [7] * 3000), 0, 16)
    assert sum(span.length for span in spans) >= 3000 - 16


def test_its_memory_is_bounded_by_the_pool() -> None:
    cached = Cached.new(1000)
    chance = np.random.default_rng(0)
    for number in range(60):
        cached.insert(f"tenant{number}", chance.integers(0, 50, 300).tolist())
        cached.index.find(f"tenant{number}", ids([1] * 40), 0, 1 + number % 20)
    assert cached.index.nbytes <= 1000 * (38 + 5 * 12)
    assert len(cached.index._roots) == len(cached.index._held) <= 4
