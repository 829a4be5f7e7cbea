"""States beside slots and prefix cache, under any order of operations, against what is obvious.

A state's content is the tokens that it has seen. The model knows each cached slot's path of tokens;
a snapshot must hold just that path, and go when its slot does.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from midfill.arrays import Int32Array
from midfill.kv.pool import KVPool
from midfill.kv.radix_cache import CacheRoot
from midfill.kv.sequence_kv import SequenceKV
from midfill.kv.state_pool import OutOfStatesError, StatePool

Path = tuple[int, ...]
TENANTS = st.sampled_from(["ann", "ann", "ann", "bob"])
DOCUMENT = [0, 1, 2, 0, 2, 1, 1, 0]
TOKENS = st.builds(
    lambda shared, tail: DOCUMENT[:shared] + tail,
    st.integers(0, len(DOCUMENT)),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
)


def int32(values: list[int] | Path) -> Int32Array:
    return np.array(values, dtype=np.int32)


class Contents:
    """A store whose states are the tokens they have seen; None is whatever was there before."""

    def __init__(self, count: int) -> None:
        self.seen: list[Path | None] = [None] * count

    @property
    def count(self) -> int:
        return len(self.seen)

    @property
    def nbytes(self) -> int:
        return 0

    def clear(self, state: int) -> None:
        self.seen[state] = ()

    def copy(self, source: int, target: int) -> None:
        self.seen[target] = self.seen[source]


@dataclass
class Paths:
    """Watches the cache: the path of tokens that each of its slots ends."""

    paths: dict[int, Path] = field(default_factory=dict)

    def added(self, root: CacheRoot, tokens: Int32Array, slots: Int32Array, after: int) -> None:
        path = self.paths[after] if after >= 0 else ()
        for token, slot in zip(tokens.tolist(), slots.tolist(), strict=True):
            path = self.paths[slot] = (*path, token)

    def removed(self, slots: Int32Array) -> None:
        for slot in slots.tolist():
            del self.paths[slot]


@dataclass(eq=False)
class Holder:
    """A sequence, of whose tokens some are computed."""

    tokens: list[int]
    kv: SequenceKV
    computed: int


class StateMachine(RuleBasedStateMachine):
    """Sequences that arrive, compute, leave snapshots, fork and end, over a few states."""

    holders = Bundle("holders")

    @initialize(slots=st.integers(14, 60), count=st.integers(2, 6))
    def start(self, slots: int, count: int) -> None:
        self.store = Contents(count)
        self.pool = KVPool(slots, self.store)
        self.cached = Paths()
        self.pool.cache.watch(self.cached)
        self.live: list[Holder] = []
        self.reused = 0

    @property
    def states(self) -> StatePool:
        assert self.pool.states is not None
        return self.pool.states

    def match(self, tenant: str, tokens: list[int]) -> Holder | None:
        """Let a sequence find its prefix, if it then fits; as the engine looks it up."""
        wanted = int32(tokens[:-1])
        found = self.pool.cache.find(tenant, wanted)
        cut = self.states.deepest(found)
        assert cut == max(
            (end for end in range(1, len(found) + 1) if self.states._after[found[end - 1]] >= 0),
            default=0,
        )
        evictable = self.pool.cache.peek(tenant, wanted[:cut]).evictable
        if self.pool.available < evictable + len(tokens) - cut:
            return None
        kv = SequenceKV(self.pool, tenant, capacity=32)
        assert kv.match_prefix(wanted[:cut]) == cut
        return Holder(list(tokens), kv, cut)

    @rule(target=holders, tenant=TENANTS, wanted=st.lists(TOKENS, min_size=1, max_size=2))
    def admit(self, tenant: str, wanted: list[list[int]]) -> object:
        """Admit sequences in one step: all find their prefixes before one of them takes a state."""
        matched: list[Holder] = []
        for tokens in wanted[: self.store.count - 1 - len(self.live)]:
            if (holder := self.match(tenant, tokens)) is not None:
                matched.append(holder)
        admitted = []
        for holder in matched:
            needed = len(holder.tokens) - holder.computed
            if self.pool.available < needed:
                holder.kv.discard()  # of what another has found, this one was to evict some
                continue
            holder.kv.start_state()
            self.reused += holder.computed > 0
            holder.kv.reserve(needed)
            assert self.content(holder) == tuple(holder.tokens[: holder.computed])
            admitted.append(holder)
        self.live += admitted
        return multiple(*admitted)

    def content(self, holder: Holder) -> Path | None:
        assert holder.kv.state is not None
        return self.store.seen[holder.kv.state]

    @rule(holder=holders, count=st.integers(1, 5), keep=st.booleans())
    def compute(self, holder: Holder, count: int, keep: bool) -> None:
        """Compute some of its tokens; they go to the cache, and maybe a snapshot with them."""
        assert holder.kv.state is not None
        assert self.content(holder) == tuple(holder.tokens[: holder.computed])
        holder.computed = min(holder.computed + count, len(holder.tokens))
        self.store.seen[holder.kv.state] = tuple(holder.tokens[: holder.computed])
        holder.kv.state_tokens = holder.computed
        holder.kv.cache_prefix(int32(holder.tokens[: holder.computed]))
        before = self.states.free + self.states.snapshots
        if keep:
            holder.kv.keep_snapshot()
            if before:
                assert self.states.deepest(holder.kv.slots[: holder.computed]) == holder.computed

    @rule(target=holders, holder=holders)
    def fork(self, holder: Holder) -> object:
        if holder.kv.owned or len(self.live) >= self.store.count - 1:
            return multiple()
        twin = Holder(list(holder.tokens), holder.kv.fork(), holder.computed)
        assert twin.kv.state != holder.kv.state
        assert self.content(twin) == self.content(holder)
        self.live.append(twin)
        return twin

    @rule(holder=consumes(holders), is_passing=st.booleans())
    def release(self, holder: Holder, is_passing: bool) -> None:
        """Ended, preempted or cancelled: the state goes on as the snapshot after its tokens."""
        before = self.states.snapshots
        holder.kv.release(int32(holder.tokens[: holder.computed]), is_passing=is_passing)
        assert self.states.snapshots >= before
        self.live.remove(holder)

    @rule(holder=consumes(holders))
    def discard(self, holder: Holder) -> None:
        before = self.states.snapshots
        holder.kv.discard()
        assert self.states.snapshots == before
        self.live.remove(holder)

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        self.pool.slots.free(self.pool.cache.evict(count))

    @invariant()
    def snapshots_are_of_cached_tokens(self) -> None:
        if not hasattr(self, "pool"):
            return
        states = self.states
        assert states.free + states.used + states.snapshots == self.store.count
        assert states.used == len(self.live)
        assert states.reused == self.reused
        assert not states._holds
        kept = np.flatnonzero(states._after >= 0).tolist()
        assert sorted(kept) == sorted(states._order)
        assert states._passing <= set(kept)
        numbers = [int(states._after[slot]) for slot in kept]
        assert len({*numbers, *(holder.kv.state for holder in self.live)}) == len(numbers) + len(
            self.live
        )
        for slot, number in zip(kept, numbers, strict=True):
            assert self.store.seen[number] == self.cached.paths[slot]

    def teardown(self) -> None:
        """Whatever happened, every state can be had again."""
        if not hasattr(self, "pool"):
            return
        for holder in self.live:
            holder.kv.release(int32(holder.tokens[: holder.computed]))
        assert self.states.used == 0
        self.pool.slots.free(self.pool.cache.evict(self.pool.slots.total))
        assert (self.states.snapshots, self.states.free) == (0, self.store.count)


StateMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestStates = StateMachine.TestCase


def pool(count: int) -> KVPool:
    return KVPool(40, Contents(count))


def computed(pool: KVPool, tokens: list[int]) -> SequenceKV:
    """A sequence with all of its tokens computed, and cached."""
    kv = SequenceKV(pool, "", capacity=32)
    kv.match_prefix(int32([]))
    kv.start_state()
    kv.reserve(len(tokens))
    kv.state_tokens = len(tokens)
    kv.cache_prefix(int32(tokens))
    return kv


def test_the_snapshot_used_least_recently_gives_its_place() -> None:
    one = pool(3)
    assert one.states is not None
    first, second, third = [0, 1], [0, 2], [0, 3]
    computed(one, first).release(int32(first))
    computed(one, second).release(int32(second))
    again = SequenceKV(one, "", capacity=32)
    assert again.match_prefix(int32(first)) == 2  # which uses its snapshot
    again.start_state()
    again.release(int32(first))
    computed(one, third).release(int32(third))
    computed(one, [0, 4])
    found = {
        tokens[1]: one.states.deepest(one.cache.find("", int32(tokens)))
        for tokens in (first, second, third)
    }
    assert found == {1: 2, 2: 0, 3: 2}
    assert (one.states.reused, one.states.evicted) == (1, 1)


def test_a_prompt_in_parts_has_one_snapshot_and_no_copies() -> None:
    one = pool(3)
    assert one.states is not None
    tokens = list(range(12))
    computed(one, [0, 50]).release(int32([0, 50]))
    computed(one, tokens[:3]).release(int32(tokens[:3]), is_passing=True)
    for end in (6, 9, 12):
        kv = SequenceKV(one, "", capacity=32)
        assert kv.match_prefix(int32(tokens[: end - 3])) == end - 3
        kv.start_state()
        kv.reserve(3)
        kv.state_tokens = end
        kv.release(int32(tokens[:end]), is_passing=end < 12)
        assert one.states.snapshots == 2
    assert (one.states.reused, one.states.evicted) == (3, 0)
    assert one.states.deepest(one.cache.find("", int32(tokens[:11]))) == 0
    assert one.states.deepest(one.cache.find("", int32(tokens))) == 12
    # Two that go on from there in one step can't both take it.
    both = [SequenceKV(one, "", capacity=32) for _ in range(2)]
    for kv in both:
        kv.match_prefix(int32(tokens))
    one.states._passing.add(int(both[0].slots[-1]))
    for kv in both:
        kv.start_state()
    assert both[0].state != both[1].state


def test_a_held_snapshot_stays_and_sequences_never_get_more_states_than_there_are() -> None:
    one = pool(2)
    assert one.states is not None
    computed(one, [0, 1]).release(int32([0, 1]))
    waiting = SequenceKV(one, "", capacity=32)
    waiting.match_prefix(int32([0, 1]))
    running = computed(one, [0, 2])
    with pytest.raises(OutOfStatesError, match="all 2 states are in use"):
        running.fork()
    running.keep_snapshot()  # no room: nothing happens
    assert one.states.snapshots == 1
    waiting.discard()
    running.fork().discard()
    assert (one.states.snapshots, one.states.evicted) == (0, 1)


def test_a_snapshot_goes_with_its_token() -> None:
    one = pool(3)
    assert one.states is not None
    computed(one, [0, 1]).release(int32([0, 1]))
    one.slots.free(one.cache.evict(1))
    assert (one.states.snapshots, one.states.free, one.states.evicted) == (0, 3, 1)


def test_a_state_that_is_ahead_of_its_tokens_is_no_snapshot() -> None:
    one = pool(3)
    assert one.states is not None
    kv = computed(one, [0, 1])
    kv.reserve(2)
    kv.state_tokens = 4
    assert not kv.state_is_ahead
    kv.truncate(3)
    assert kv.state_is_ahead
    with pytest.raises(ValueError, match="a state of 4 tokens after 2 cached"):
        kv.keep_snapshot()
    kv.release(int32([0, 1, 2]))
    assert (one.states.snapshots, one.states.free) == (0, 3)
