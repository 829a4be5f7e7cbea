"""Radix cache and slot pool against a naive model, under any order of operations.

The model keeps one entry per cached position, whose key is the whole path of tokens up to it. It
is slow and obvious. Pool and cache must agree with it after every operation: the same slots, the
same order of eviction, no leak, no double free.
"""

from dataclasses import dataclass, field, replace

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
    precondition,
    rule,
)

from midfill.arrays import Int32Array
from midfill.kv.branches import Branches
from midfill.kv.donor_index import DonorIndex
from midfill.kv.pool import KVPool
from midfill.kv.radix_cache import BranchRoot, CacheRoot
from midfill.kv.sequence_kv import SequenceKV

Path = tuple[int, ...]

TENANTS = st.sampled_from(["ann", "ann", "ann", "bob"])
# Prompts that share prefixes of any length, as edits of one document do.
DOCUMENT = [0, 1, 2, 0, 2, 1, 1, 0]
TOKENS = st.builds(
    lambda shared, tail: DOCUMENT[:shared] + tail,
    st.integers(0, len(DOCUMENT)),
    st.lists(st.integers(0, 2), min_size=1, max_size=3),
)


def common(a: list[int], b: Path) -> int:
    """How many leading tokens two texts have in common."""
    differs = (place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differs, min(len(a), len(b)))


def int32(values: list[int] | Path) -> Int32Array:
    return np.array(values, dtype=np.int32)


@dataclass
class Position:
    slot: int
    last_used: int
    low_priority: bool


@dataclass
class NaiveCache:
    """What is cached: (tenant, path) -> position; what is locked: a list of such paths."""

    positions: dict[tuple[CacheRoot, Path], Position] = field(default_factory=dict)
    locks: list[tuple[CacheRoot, Path]] = field(default_factory=list)
    clock: int = 0

    def longest(self, tenant: CacheRoot, tokens: list[int]) -> Path:
        length = 0
        while length < len(tokens) and (tenant, tuple(tokens[: length + 1])) in self.positions:
            length += 1
        return tuple(tokens[:length])

    def slots(self, tenant: CacheRoot, path: Path) -> list[int]:
        return [self.positions[tenant, path[:end]].slot for end in range(1, len(path) + 1)]

    def touch(self, tenant: CacheRoot, path: Path, low_priority: bool = False) -> None:
        self.clock += 1
        for end in range(1, len(path) + 1):
            position = self.positions[tenant, path[:end]]
            position.last_used = self.clock
            position.low_priority = position.low_priority and low_priority

    def locked(self, tenant: CacheRoot, path: Path) -> bool:
        return any(
            owner == tenant and held[: len(path)] == path and path for owner, held in self.locks
        )

    def evictable(self) -> int:
        return sum(not self.locked(*key) for key in self.positions)

    def evict_one(self) -> int:
        parents = {(tenant, path[:-1]) for tenant, path in self.positions}
        leaves = [key for key in self.positions if key not in parents and not self.locked(*key)]

        def rank(key: tuple[CacheRoot, Path]) -> tuple[bool, int]:
            position = self.positions[key]
            return not position.low_priority, position.last_used

        return self.positions.pop(min(leaves, key=rank)).slot

    def insert(self, holder: "Holder", tokens: list[int], slots: list[int]) -> list[int]:
        """Return the offered slots that are duplicates."""
        tenant, low_priority = holder.root or holder.tenant, holder.kv.low_priority
        known = len(self.longest(tenant, tokens))
        self.touch(tenant, tuple(tokens[:known]), low_priority)
        for end in range(known + 1, len(tokens) + 1):
            position = Position(slots[end - 1], 0, low_priority)
            self.positions[tenant, tuple(tokens[:end])] = position
        self.touch(tenant, tuple(tokens), low_priority)
        stored = self.slots(tenant, tuple(tokens))
        return [mine for mine, theirs in zip(slots, stored, strict=True) if mine != theirs]


@dataclass
class Holder:
    """A sequence as the model sees it: ``shared`` of ``slots`` are the cache's, locked.

    The first ``base`` of them are in the tenant's tree, the others in that of ``root``.
    """

    tenant: str
    tokens: list[int]
    kv: SequenceKV
    shared: int
    slots: list[int]
    base: int = 0
    root: CacheRoot = ""

    @property
    def lock(self) -> tuple[CacheRoot, Path]:
        return self.root or self.tenant, tuple(self.tokens[self.base : self.shared])

    @property
    def base_lock(self) -> tuple[CacheRoot, Path]:
        return self.tenant, tuple(self.tokens[: self.base])


class KVMachine(RuleBasedStateMachine):
    """Sequences that arrive, compute, share, fork, are cancelled or end, over one small pool."""

    holders = Bundle("holders")

    @initialize(slots=st.integers(12, 60))
    def start(self, slots: int) -> None:
        self.pool = KVPool(slots)
        self.model = NaiveCache()
        self.free = set(range(slots))
        self.live: list[Holder] = []
        self.donors = DonorIndex(slots)
        self.pool.cache.watch(self.donors)
        self.branches = Branches(self.pool.cache)
        self.bases: dict[BranchRoot, Path] = {}

    def take(self, count: int) -> None:
        """Evict what an allocation needs from the model."""
        while len(self.free) < count:
            self.free.add(self.model.evict_one())

    def claim(self, slots: list[int]) -> None:
        assert len(set(slots)) == len(slots)
        assert self.free.issuperset(slots), "a slot was allocated while it was held"
        self.free.difference_update(slots)

    @rule(tenant=TENANTS, tokens=TOKENS)
    def match(self, tenant: str, tokens: list[int]) -> None:
        found = self.pool.cache.match(tenant, int32(tokens))
        path = self.model.longest(tenant, tokens)
        self.model.touch(tenant, path)
        assert found.slots.tolist() == self.model.slots(tenant, path)

    @rule(tenant=TENANTS, tokens=TOKENS)
    def peek(self, tenant: str, tokens: list[int]) -> None:
        path = self.model.longest(tenant, tokens)
        evictable = sum(not self.model.locked(tenant, path[: end + 1]) for end in range(len(path)))
        assert self.pool.cache.peek(tenant, int32(tokens)) == (len(path), evictable)

    @rule(target=holders, tenant=TENANTS, tokens=TOKENS, low_priority=st.booleans())
    def match_prefix(self, tenant: str, tokens: list[int], low_priority: bool) -> object:
        """Admit a sequence if its slots are available, as the engine does."""
        cached, evictable = self.pool.cache.peek(tenant, int32(tokens[:-1]))
        if self.pool.available < evictable + len(tokens) - cached:
            return multiple()
        kv = SequenceKV(self.pool, tenant, capacity=32, low_priority=low_priority)
        path = self.model.longest(tenant, tokens[:-1])
        self.model.touch(tenant, path, low_priority)
        assert kv.match_prefix(int32(tokens[:-1])) == len(path) == cached
        self.model.locks.append((tenant, path))
        self.take(len(tokens) - cached)
        kv.reserve(len(tokens) - cached)
        slots = kv.slots.tolist()
        assert slots[:cached] == self.model.slots(tenant, path)
        self.claim(slots[cached:])
        holder = Holder(tenant, list(tokens), kv, cached, slots)
        self.model.locks.append(holder.base_lock)
        self.live.append(holder)
        return holder

    @rule(holder=holders, token=st.integers(0, 2))
    def grow(self, holder: Holder, token: int) -> None:
        """A decode step: one more token, one more slot."""
        if not self.pool.available or len(holder.tokens) == 32:
            return
        self.take(1)
        slot = int(self.pool.allocate(1)[0])
        self.claim([slot])
        holder.kv.append(slot)
        holder.tokens.append(token)
        holder.slots.append(slot)

    @rule(holder=holders, part=st.floats(0, 1))
    def cache_prefix(self, holder: Holder, part: float) -> None:
        """Some of the KV that the sequence owns has been computed; it enters the cache."""
        count = holder.shared + round(part * (len(holder.slots) - holder.shared))
        holder.kv.cache_prefix(int32(holder.tokens[:count]))
        self.model_cache_prefix(holder, count)
        assert holder.kv.slots.tolist() == holder.slots

    def model_cache_prefix(self, holder: Holder, count: int) -> None:
        if count == holder.shared:
            return
        root, own = holder.root or holder.tenant, slice(holder.base, count)
        tokens = holder.tokens[own]
        self.free.update(self.model.insert(holder, tokens, holder.slots[own]))
        self.model.locks.remove(holder.lock)
        holder.shared = count
        self.model.locks.append(holder.lock)
        holder.slots[own] = self.model.slots(root, tuple(tokens))

    @rule(target=holders, holder=holders)
    def fork(self, holder: Holder) -> object:
        if holder.kv.owned:
            with pytest.raises(ValueError, match="only KV that the cache holds"):
                holder.kv.fork()
            return multiple()
        twin = replace(
            holder, tokens=list(holder.tokens), kv=holder.kv.fork(), slots=list(holder.slots)
        )
        self.model.locks.append(twin.base_lock)
        self.model.locks.append(twin.lock)
        self.live.append(twin)
        return twin

    @rule(holder=holders, variant=st.integers(1, 2))
    def start_branch(self, holder: Holder, variant: int) -> None:
        """From now on its KV is not what its tokens give by themselves."""
        if holder.root:
            return
        base = tuple(holder.tokens[: holder.shared])
        branch = self.branches.start(holder.tenant, variant, int32(base))
        self.bases[branch.root] = base
        holder.kv.start_branch(branch)
        self.model.locks.remove(holder.lock)
        self.model.locks.remove(holder.base_lock)
        holder.base, holder.root = holder.shared, branch.root
        self.model.locks += [holder.base_lock, holder.lock]

    @rule(target=holders, tenant=TENANTS, tokens=TOKENS, variant=st.integers(1, 2))
    def match_branch(self, tenant: str, tokens: list[int], variant: int) -> object:
        """Admit a sequence that continues a branch, if that leaves it little to compute."""
        wanted = int32(tokens[:-1])
        exact = self.pool.cache.peek(tenant, wanted)
        path = self.model.longest(tenant, tokens[:-1])
        reach = max(
            (
                len(base) + len(more)
                for root, base in self.bases.items()
                if (root.tenant, root.variant) == (tenant, variant) and path[: len(base)] == base
                if (more := self.model.longest(root, tokens[len(base) : -1]))
            ),
            default=0,
        )
        found = self.branches.find(tenant, variant, wanted, exact)
        left = len(wanted) - exact.tokens
        if found is None:
            assert reach <= exact.tokens + 3 * left // 4
            return multiple()
        branch, cached = found
        assert cached.tokens == reach > exact.tokens
        if self.pool.available < cached.evictable + len(tokens) - reach:
            return multiple()
        kv = SequenceKV(self.pool, tenant, capacity=32)
        assert kv.match_branch(wanted, branch) == reach
        base = len(branch.base)
        self.model.touch(tenant, tuple(tokens[:base]))
        self.model.touch(branch.root, tuple(tokens[base:reach]))
        holder = Holder(tenant, list(tokens), kv, reach, [], base, branch.root)
        self.model.locks += [holder.base_lock, holder.lock]
        self.take(len(tokens) - reach)
        kv.reserve(len(tokens) - reach)
        holder.slots = kv.slots.tolist()
        self.claim(holder.slots[reach:])
        assert holder.slots[:base] == self.model.slots(tenant, tuple(tokens[:base]))
        self.live.append(holder)
        return holder

    @rule(holder=holders, count=st.integers(1, 4))
    def truncate(self, holder: Holder, count: int) -> None:
        """The last tokens are dropped; those that the cache holds can't be."""
        kept = len(holder.slots) - count
        if kept < holder.shared:
            with pytest.raises(ValueError, match="the cache holds"):
                holder.kv.truncate(kept)
            return
        holder.kv.truncate(kept)
        self.free.update(holder.slots[kept:])
        del holder.slots[kept:], holder.tokens[kept:]
        assert holder.kv.slots.tolist() == holder.slots

    @rule(holder=consumes(holders), part=st.floats(0, 1))
    def release(self, holder: Holder, part: float) -> None:
        """Finished, preempted or cancelled: computed KV stays cached."""
        count = holder.shared + round(part * (len(holder.slots) - holder.shared))
        holder.kv.release(int32(holder.tokens[:count]))
        self.model_cache_prefix(holder, count)
        self.forget(holder)

    @rule(holder=consumes(holders))
    def discard(self, holder: Holder) -> None:
        """Failed: KV that the sequence owns is lost."""
        holder.kv.discard()
        self.forget(holder)

    def forget(self, holder: Holder) -> None:
        self.live = [other for other in self.live if other is not holder]
        self.free.update(holder.slots[holder.shared :])
        self.model.locks.remove(holder.base_lock)
        self.model.locks.remove(holder.lock)

    @rule(tenant=TENANTS, tokens=TOKENS, least=st.integers(1, 4))
    def find_donors(self, tenant: str, tokens: list[int], least: int) -> None:
        """Every span that stands anywhere in exact text of the tenant, longest first."""
        paths = {path for owner, path in self.model.positions if owner == tenant}
        at, expected = 1, []
        while at < len(tokens):
            lengths = [
                common(tokens[at:], path[place:]) for path in paths for place in range(1, len(path))
            ]
            most = max(lengths, default=0)
            if most >= least:
                expected.append((at, most))
            at += most if most >= least else 1
        found = self.donors.find(tenant, int32(tokens), 0, least)
        assert [(span.start, span.length) for span in found] == expected
        for span in found:
            wanted = tuple(tokens[span.start : span.end])
            places = [
                self.model.slots(tenant, path)[span.position :]
                for path in paths
                if path[span.position :] == wanted
            ]
            assert span.slots.tolist() in places

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        expected = [self.model.evict_one() for _ in range(min(count, self.model.evictable()))]
        slots = self.pool.cache.evict(count)
        assert set(slots.tolist()) == set(expected)
        self.pool.slots.free(slots)
        self.free.update(expected)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def released_by(self, data: st.DataObject) -> None:
        """The predicted release of victims equals releasing them in the model."""
        victims = data.draw(st.lists(st.sampled_from(range(len(self.live))), unique=True))
        chosen = [self.live[index] for index in victims]
        predicted = self.pool.cache.released_by(
            node for holder in chosen for node in holder.kv.nodes
        )
        before = self.model.evictable()
        remaining = list(self.model.locks)
        for holder in chosen:
            remaining.remove(holder.lock)
            remaining.remove(holder.base_lock)
        kept, self.model.locks = self.model.locks, remaining
        assert predicted == self.model.evictable() - before
        self.model.locks = kept

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        cache = self.pool.cache
        assert cache.cached_tokens == len(self.model.positions)
        assert cache.evictable_tokens == self.model.evictable()
        assert cache.tenants == len(
            {root if isinstance(root, str) else root.tenant for root, _ in self.model.positions}
        )
        assert self.pool.slots.free_slots == len(self.free)
        owned = sum(holder.kv.owned for holder in self.live)
        assert len(self.free) + cache.cached_tokens + owned == self.pool.slots.total

    def teardown(self) -> None:
        """Whatever happened, every slot can be freed again."""
        if not hasattr(self, "pool"):
            return
        for holder in self.live:
            holder.kv.release(int32(holder.tokens))
        total = self.pool.slots.total
        assert self.pool.available == total
        assert sorted(self.pool.allocate(total).tolist()) == list(range(total))
        assert self.pool.cache.tenants == 0


KVMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=60, deadline=None)
TestKV = KVMachine.TestCase
